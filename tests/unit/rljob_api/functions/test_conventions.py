"""The table of forms: its order, RLJob's own forms without plugins, and plugins that cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin, collect, load_signatures
from tests.support.loading import find_problems


def check(source: str, references: dict[str, str], **settings: str) -> list[str]:
    return find_problems(source, signatures=references, **settings)


def test_core_knows_its_plain_form_alone() -> None:
    assert check("def reward(prompt, response, ground_truth): ...", {}) == []
    assert check("def grade(text): ...", {}, entrypoint="grade") != []
    [problem] = check("def compute_score(solution_str): ...", {})
    assert "compute_score(solution_str) does not match a convention" in problem
    [problem] = check("def compute_score(solution_str): ...", {}, signature="verl")
    assert problem == (
        "reward.py:1: signature: verl is not installed; known are auto, plain; install the package of its plugin"
    )


def test_forms_are_tried_by_their_ranks_and_then_by_the_names_of_their_plugins() -> None:
    def build(name: str, rank: int) -> SignaturePlugin:
        return SignaturePlugin((Convention(name, "f(a)", ("a",), {"a": values.COMPLETION}, rank=rank),))

    known = collect([build("a", 600), build("b", 100), build("c", 600)])
    assert [convention.name for convention in known.conventions] == ["b", *["plain"] * 4, "a", "c"]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "rljob_broken.py").write_text("import no_such_project\n")
    monkeypatch.syspath_prepend(tmp_path)
    return {"broken": "rljob_broken:SIGNATURE"}


def test_plugin_that_cannot_be_imported_costs_its_own_forms(broken: dict[str, str]) -> None:
    assert check("def reward(response): ...", broken) == []
    problem = "the plugin of broken cannot be imported: ModuleNotFoundError: No module named 'no_such_project'"
    assert check("def reward(response): ...", broken, signature="broken") == [f"reward.py:1: signature: {problem}"]
    [unknown] = check("def reward(a, b): ...", broken)
    assert unknown.endswith(f"; {problem}")


def test_entry_point_that_names_something_else_is_broken() -> None:
    assert load_signatures({"x": "json"}).broken == {"x": "TypeError: json is not a SignaturePlugin"}
