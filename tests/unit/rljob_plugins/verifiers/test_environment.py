"""verifiers before 0.4: what surrounds its own loop. tests/integration/packaged_environments runs the loops."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_plugins.verifiers.legacy import LegacyEnvironment
from rljob_plugins.verifiers.rows import find_index
from rljob_plugins.verifiers.v1 import has_own_servers
from rljob_service.worker import environments
from tests.support.environments import build_episode, load_adapter


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def test_functions_of_the_rubric_keep_their_signature_and_their_errors_are_noted() -> None:
    async def fails(state: Any) -> float:
        raise ValueError("boom")

    rubric = SimpleNamespace(rubrics=[SimpleNamespace(funcs=[right]), SimpleNamespace(funcs=[fails])])
    made = SimpleNamespace(rubric=rubric, requires_group_rollouts=False, run_rollout=None)
    loaded = LegacyEnvironment(made)
    watched, failing = rubric.rubrics[0].funcs[0], rubric.rubrics[1].funcs[0]
    assert inspect.signature(watched) == inspect.signature(right)
    problems: list[BaseException] = []
    loaded._problems.set(problems)
    assert asyncio.run(watched("4", "4")) == 1.0
    with pytest.raises(ValueError, match="boom"):
        asyncio.run(failing(None))
    assert [str(problem) for problem in problems] == ["boom"]


def test_rubric_that_compares_a_group_is_refused() -> None:
    made = SimpleNamespace(rubric=SimpleNamespace(funcs=[]), requires_group_rollouts=True, run_rollout=None)
    with pytest.raises(UserError, match="compares the answers of a group"):
        environments.adopt(load_adapter("verifiers"), made, {})
    with pytest.raises(UserError, match="not an environment of verifiers"):
        environments.adopt(load_adapter("verifiers"), object, {})


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


class Dataset(list[dict[str, Any]]):
    """Implements what RLJob uses of datasets.Dataset."""


def make_legacy(train: Dataset | None, held_out: Dataset | None) -> Any:
    rubric = SimpleNamespace(funcs=[])
    return SimpleNamespace(
        rubric=rubric,
        requires_group_rollouts=False,
        run_rollout=None,
        build_dataset=lambda: train,
        build_eval_dataset=lambda: held_out,
    )


def test_rows_are_the_examples_of_a_split_with_the_number_that_finds_them_again() -> None:
    example = {"prompt": [{"role": "user", "content": "2?"}], "info": {"a": 1}, "index": 9, "example_id": 0}
    loaded = environments.adopt(load_adapter("verifiers"), make_legacy(Dataset([example, example]), None), {})
    assert loaded.list_rows is not None
    rows = loaded.list_rows("train")
    assert (len(rows), rows[1]) == (2, {**example, "answer": None, "index": 1})
    assert find_index(build_episode(**{"index": 0} | {"index": rows[1]["index"]}), 2) == 1
    for split in ("eval", "test"):
        with pytest.raises(
            UserError, match=f"no dataset for the split {split}: verifiers has the splits train and eval"
        ):
            loaded.list_rows(split)  # and never the dataset of training, as verifiers' get_eval_dataset does


def test_load_environment_and_tasksets_are_found_in_a_source() -> None:
    adapter = load_adapter("verifiers")
    base = type("Taskset", (), {"__module__": "verifiers.v1.taskset"})
    assert adapter.is_environment("load_environment", right)
    assert adapter.is_environment("Squares", type("Squares", (base,), {}))
    assert not adapter.is_environment("right", right)
