"""How the groups of a step become calls of the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from rljob_api.manifest.job import RLJob
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.updates import MiniBatch, StepUpdates
from rljob_trainer.episodes.types import Group, ScoredResult, UpdateVersions
from tests.support.driver_harness import make_job
from tests.support.episodes import episode


def make_group(number: int) -> Group:
    group = Group(number, Prompt(number, f"p{number}", [1]))
    group.episodes = [
        episode(index=(0, number, i), score=score, results={"correct": ScoredResult(id="x", valid=True, score=score)})
        for i, score in enumerate((0.0, 1.0))
    ]
    return group


class Lane:
    """Hands over groups as the test says: after a wait, [] is that nothing came in time."""

    def __init__(self, *arrivals: int, is_generating: Sequence[bool] = ()) -> None:
        self._arrivals, self._is_generating = list(arrivals), list(is_generating)
        self._next = 0

    async def take(self, limit: int, wait_seconds: float | None = None) -> list[Group]:
        count = min(self._arrivals.pop(0), limit)
        assert count or wait_seconds is not None, "with nothing to train, the step waits as long as it takes"
        self._next += count
        return [make_group(number) for number in range(self._next - count, self._next)]

    def is_generating(self) -> bool:
        return self._is_generating.pop(0) if self._is_generating else False

    async def rescore_stale(self, groups: Sequence[Group]) -> None:
        pass


class Trainer:
    def __init__(self) -> None:
        self.calls: list[int] = []
        """Groups of each `accumulate`."""
        self.versions: list[UpdateVersions] = []

    async def accumulate(self, rows: Sequence[Any], versions: UpdateVersions) -> None:
        self.calls.append(len(rows) // 2)
        self.versions.append(versions)


@pytest.mark.parametrize(
    ("lane", "calls"),
    [
        pytest.param(Lane(8), [8], id="all at once"),
        pytest.param(Lane(5, 2, 1), [8], id="scores that follow at once wait for each other"),
        pytest.param(Lane(5, 0, 3), [5, 3], id="what is scored trains before slow scores"),
        pytest.param(Lane(1, 0, 0, 7, is_generating=[True, True]), [8], id="answers that are sampled are waited for"),
        pytest.param(Lane(1, 0, 7, is_generating=[False]), [1, 7], id="nothing is sampled now"),
    ],
)
async def test_groups_train_in_few_calls(lane: Any, calls: list[int]) -> None:
    job = make_job(
        algorithm={"groupSize": 2},
        schedule={"promptsPerStep": 8, "miniBatches": 1},
        rewards=[{"name": "correct", "function": {"inline": "x"}}],
    )
    trainer: Any = Trainer()

    [batch] = await run_updates(job, trainer, lane)

    assert trainer.calls == calls
    assert [group.index for group in batch.groups] == list(range(8))


async def run_updates(job: RLJob, trainer: Any, lane: Any) -> list[MiniBatch]:
    """Accumulate the rows of one step, as the loop does."""
    spec, batches = job.spec, []
    updates = StepUpdates(
        spec.schedule,
        build_algorithm(spec),
        trainer,
        contextlib.nullcontext,
        full_tokens=spec.trainer.largest_micro_batch * spec.trainer.num_ranks,
    )
    for batch in updates.mini_batches(0):
        async for rows in updates.rows(batch, lane):
            await trainer.accumulate(rows, batch.versions)
        batches.append(batch)
    return batches


@pytest.mark.parametrize(("type_", "ends"), [("grpo", [1, 1]), ("gspo", [0, 0.5])])
async def test_stale_tokens_are_clipped_unless_the_range_is_for_one_step(type_: str, ends: list[float]) -> None:
    job = make_job(
        algorithm={"groupSize": 2, "type": type_},
        schedule={"promptsPerStep": 8, "miniBatches": 2},
        rewards=[{"name": "correct", "function": {"inline": "x"}}],
    )
    trainer: Any = Trainer()
    lane: Any = Lane(4, 4)
    await run_updates(job, trainer, lane)
    assert [each.end for each in trainer.versions] == ends
