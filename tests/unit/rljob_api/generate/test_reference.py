from __future__ import annotations

import re
from typing import Any

from rljob_api.generate import crd
from rljob_api.generate.reference import build_reference
from rljob_api.manifest.base import yaml_fields
from rljob_api.manifest.roles import Role

SCHEMAS = {model.__name__: crd.build_object_schema(model) for model in crd.KINDS}
PAGE = build_reference(*SCHEMAS.values())
COMMON = set(yaml_fields(Role))


def leaves(node: dict[str, Any], path: str) -> list[str]:
    found = []
    for name, inner in node.get("properties", {}).items():
        found.append(f"{path}.{name}")
        found += leaves(inner.get("items", inner), f"{path}.{name}{'[]' if 'items' in inner else ''}")
    return found


def is_listed(field: str) -> bool:
    """Whether a field has a row, or an object that it is in has the fields of another, which has it."""
    if f"\n- `{field}` (" in PAGE or f"### {field}\n" in PAGE:
        return True
    *holders, _ = (field[: match.start()] for match in re.finditer(r"\.|$", field))
    for holder in reversed(holders):
        [meaning] = re.findall(rf"^- `{re.escape(holder.removesuffix('[]'))}` \(.*", PAGE, re.M) or [""]
        name, dot, rest = field.removeprefix(f"{holder}.").partition(".")
        shared = re.findall(
            r"Has (?:the fields of|(.*?) as in) `(.*?)`(?:, without (.*?))?(?:; on change: .*?)?\.", meaning
        )
        for only, other, without in shared:
            known = name.removesuffix("[]")
            if (
                (not only or f"`{known}`" in only)
                and f"`{known}`" not in without
                and is_listed(f"{other}.{name}{dot}{rest}")
            ):
                return True
    return False


def test_page_lists_all_fields() -> None:
    for field in leaves(SCHEMAS["RLJob"]["properties"]["spec"], "spec"):
        parts = field.split(".")
        if len(parts) > 2 and parts[1] in ("head", "trainer", "rollout", "rewards[]") and parts[2] in COMMON:
            field = ".".join(["spec", "ROLE", *parts[2:]])
        assert is_listed(field), field


def test_a_field_that_no_object_has_is_not_listed() -> None:
    assert not is_listed("spec.data.eval.weight")
    assert not is_listed("spec.agent.user.function.signature")


def test_shared_fields_say_what_a_change_does_where_it_differs() -> None:
    effects = {"data.train.source": "refused", "data.eval.source": "head", "data.eval.subset": "none"}
    page = build_reference(*SCHEMAS.values(), effects)
    assert "Has `source` as in `spec.data.train`; on change: head." in page
    assert "- `spec.data.eval.subset` (string; none): " in page, "its description is short"
    assert "- `spec.data.eval.split` " not in page


def test_page_shows_defaults_bounds_and_choices() -> None:
    assert "- `spec.algorithm.optimizer.learningRate` (number >0, default `1e-06`): Peak learning rate.\n" in PAGE
    assert '- `spec.data.format` (`chat|text`, default `"chat"`): ' in PAGE
    assert "- `spec.model.source` (string, required): " in PAGE
    assert "(integer >=0 <=16, " in PAGE


def test_page_lists_what_may_not_change() -> None:
    assert "- Immutable: `task`, `model`, `data.mix`, " in PAGE
    assert "- Unless it is suspended: `trainer.replicas`, " in PAGE
