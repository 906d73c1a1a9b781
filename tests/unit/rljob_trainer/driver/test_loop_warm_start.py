"""The driver loop with a warm start: given rows first, by the same steps, and then RL."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rljob_trainer.episodes.types import TrainRow
from rljob_trainer.feed.given_rows import GivenRows
from tests.support.driver_harness import stop_when

GIVEN = {
    "data": {"warmStart": {"source": "/w.jsonl"}},
    "schedule": {"steps": 6, "warmStart": {"steps": 3}, "miniBatches": 2},
    "checkpoint": {"everySteps": 1},
    "evaluation": {"everySteps": 2},
}
NUM_ROWS = 7


def given_row(number: int) -> TrainRow:
    mask = np.array([False, True, True])
    ids = np.array([5, 6, 100 + number], np.int32)
    return TrainRow(ids, mask, np.zeros(3, np.float32), mask.astype(np.float32), np.zeros(3, np.int32))


def place_rows(harness):
    harness.given = GivenRows([(number, [given_row(number)]) for number in range(NUM_ROWS)], seed=7, shuffle=True)


@pytest.mark.parametrize("kind", ["onPolicy", "bounded"])
async def test_warm_steps_train_given_rows_without_rollouts_or_rewards(make_harness, kind):
    async with make_harness(**{**GIVEN, "schedule": {**GIVEN["schedule"], "type": kind}}) as harness:
        place_rows(harness)
        summary = await harness.run()
        steps, updates = harness.metrics().steps, harness.updates
        lanes = {(row.step, row.lane) for row in harness.trajectories().values()}
    assert [step.prompt_sources[:1] for step in steps] == [["warmStart"]] * 3 + [[]] * 3
    drawn = [number for step in steps[:3] for number in step.prompts]
    assert sorted(drawn[:NUM_ROWS]) == [*range(NUM_ROWS)], "an epoch has each row once"
    assert [[int(row.token_ids[-1]) - 100 for row in rows] for rows in updates[:6]] == [
        drawn[start : start + 2] for start in range(0, 12, 2)
    ], "each step has two mini-batches of two rows"
    assert {step for step, lane in lanes if lane == "train"} == {4, 5, 6}
    assert [step.num_samples for step in steps] == [0] * 3 + [16] * 3
    assert [step.loss for step in steps] == [pytest.approx(0.1)] * 6
    for name in ("reward", "logprob_difference", "clip_fraction", "effective_sample_share", "staleness_mean"):
        assert {getattr(step, name) for step in steps[:3]} == {None}, f"nothing is known of {name}"
    assert {step.staleness_max for step in steps[3:]} <= {0, 1, 2}
    assert sorted(harness.metrics().evaluations, key=lambda each: each.step)[-1].step == 6
    assert summary.steps == 6
    assert harness.board.status.learning.is_learning is not False


async def test_a_killed_driver_trains_the_rows_of_an_undisturbed_one(make_harness):
    async with make_harness("undisturbed", **GIVEN) as harness:
        place_rows(harness)
        await harness.run()
        expected, weight = harness.metrics().prompts_trained, harness.final_weight()
    draw = random.Random(0)
    async with make_harness("killed", **GIVEN) as harness:
        place_rows(harness)
        for _ in range(4):
            dies_after = len(harness.updates) + draw.randrange(1, 4)
            await stop_when(harness, lambda: len(harness.updates) >= dies_after)  # noqa: B023
        await harness.run()
        assert harness.metrics().prompts_trained == expected
        assert harness.final_weight() == weight


async def test_first_step_of_rl_may_take_longer_than_those_before_it(make_harness):
    async with make_harness(**GIVEN) as harness:
        place_rows(harness)
        limits = {}
        await stop_when(
            harness, lambda: limits.setdefault(harness.board.status.step, harness.board.snapshot()) and 3 in limits
        )
        assert [limits[step].step_limit_seconds for step in (2, 3)] == [60, 7200]
