from __future__ import annotations

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


def test_page_lists_all_fields() -> None:
    fields = leaves(SCHEMAS["RLJob"]["properties"]["spec"], "spec")
    sections = {f"spec.{name}" for name in SCHEMAS["RLJob"]["properties"]["spec"]["properties"]}
    for field in fields:
        parts = field.split(".")
        if len(parts) > 2 and parts[1] in ("head", "trainer", "rollout", "rewards[]") and parts[2] in COMMON:
            field = ".".join(["spec", "ROLE", *parts[2:]])
        assert f"`{field}`" in PAGE or (field in sections and f"### {field}\n" in PAGE), field


def test_page_shows_defaults_bounds_and_choices() -> None:
    assert "| `spec.algorithm.optimizer.learningRate` | number > 0 | `1e-06` | Peak learning rate. |" in PAGE
    assert '| `spec.data.format` | `chat`, `text` | `"chat"` |' in PAGE
    assert "| `spec.model.source` | text | required |" in PAGE
    assert "whole number >= 0, <= 16" in PAGE


def test_page_lists_the_rules() -> None:
    assert "schedule.miniBatches must divide schedule.promptsPerStep" in PAGE
    assert "model is immutable" in PAGE


def test_table_rows_have_four_cells() -> None:
    for line in PAGE.splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 5, line
