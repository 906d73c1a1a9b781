"""verifiers: what surrounds its own loop. tests/integration/packaged_environments runs the loops."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_plugins.verifiers.v1 import Numbered, find_index, has_own_servers
from rljob_service.worker import environments
from tests.support.environments import build_episode, load_adapter


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


@pytest.mark.parametrize("value", [object, lambda: None, object()])
def test_what_is_not_a_taskset_is_refused(value: Any) -> None:
    """An environment of verifiers before 0.4, or its load_environment."""
    with pytest.raises(UserError, match=r"is not a Taskset of verifiers 0.4; environments of verifiers before 0.4"):
        environments.adopt(load_adapter("verifiers"), value, {})


def test_verifiers_before_tasksets_is_refused_with_the_version_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.1.dev2")
    with pytest.raises(UserError, match=r"verifiers 0\.3\.1\.dev2 has no tasksets; set verifiers==0\.4\.0"):
        environments.make(load_adapter("verifiers"), "reverse-text", {})


@pytest.mark.parametrize(("index", "num_tasks"), [(3, 3), (-1, 3), (None, 3), ("1", None)])
def test_row_must_name_a_task(index: Any, num_tasks: int | None) -> None:
    assert find_index(build_episode(index=2), 3) == 2
    with pytest.raises(UserError, match="is not a task of the environment, whose dataset has"):
        find_index(build_episode(index=index), num_tasks)


def test_environment_with_servers_of_its_own_shares_no_process() -> None:
    """`serving` starts and stops them for each episode, on the object that all episodes of a process have."""

    class Base:
        async def start(self) -> None: ...

    Base.__module__ = "verifiers.v1.env"
    plain, serving = type("Plain", (Base,), {}), type("Serving", (Base,), {"stop": right})
    assert not has_own_servers(plain())
    assert has_own_servers(serving())
    assert has_own_servers(type("Heir", (serving,), {})())
    adapter = load_adapter("verifiers")
    assert [adapter.is_async(SimpleNamespace(shares=shares)) for shares in (True, False)] == [True, False]


def test_tasks_are_rows_with_the_number_that_finds_them_again() -> None:
    rows = Numbered(2, [{"prompt": "2?", "index": 9}, {"prompt": "3?", "answer": "3"}].__getitem__)
    assert list(rows) == [{"prompt": "2?", "answer": None, "index": 0}, {"prompt": "3?", "answer": "3", "index": 1}]
    assert find_index(build_episode(**{"index": 0} | {"index": rows[1]["index"]}), len(rows)) == 1


def test_tasksets_are_found_in_a_source() -> None:
    adapter = load_adapter("verifiers")
    base = type("Taskset", (), {"__module__": "verifiers.v1.taskset"})
    assert not adapter.is_environment("load_environment", right)
    assert adapter.is_environment("Squares", type("Squares", (base,), {}))
