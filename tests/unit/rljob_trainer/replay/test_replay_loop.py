"""A run of the real driver against fake servers, and replays of its log with the same fake trainer."""

from __future__ import annotations

import pytest

from rljob_api.run.folder import FILE_METRICS, trajectory_file
from rljob_api.run.metrics import read_metrics
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreResult
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.train_lane import TrainLane
from rljob_trainer.driver.updates import StepUpdates
from rljob_trainer.history.recorded_groups import read_groups
from rljob_trainer.replay.program import ReplayLoop, build_ledger
from tests.support.driver_fakes import FakeTrainer
from tests.support.driver_harness import make_job

_NUMBERS = ("loss", "num_tokens", "reward", "reward_std", "num_masked", "zero_signal_share", "prompts", "weight_digest")


class CountingTrainer(FakeTrainer):
    """Remembers the episodes of each call."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.calls: list[list[int]] = []

    async def accumulate(self, rows, versions):
        self.calls.append([row.episode for row in rows])
        await super().accumulate(rows, versions)


async def replay(harness, job, folder, steps, weight=0):
    """Return the trainer and the records of a replay of the harness' run."""
    folder.mkdir()
    trainer, algorithm = CountingTrainer(harness, "r", weight), build_algorithm(job.spec)
    ledger = build_ledger(folder, job, algorithm, min(steps), StatusBoard(), None)
    updates = StepUpdates(job.spec.schedule, algorithm, trainer, ledger.clock.training, full_tokens=1000)
    loop = ReplayLoop(
        trainer, updates, ledger, lambda step: read_groups(trajectory_file(harness.run_dir, step, "train"))
    )
    await loop.run(steps)
    await ledger.trajectories.close()
    return trainer, read_metrics(folder / FILE_METRICS).steps


def numbers(record):
    return {name: getattr(record, name) for name in _NUMBERS}


def abstain_twice(reward, body):
    if body["id"].endswith(("/2/1", "/5/0")):
        return ScoreResult(id=body["id"], valid=False, reason=InvalidReason.ABSTAINED)
    return None


@pytest.mark.parametrize(
    ("type_", "mini_batches", "algorithm"),
    [("onPolicy", 1, "grpo"), ("synchronous", 2, "grpo"), ("bounded", 2, "reinforcePlusPlus"), ("bounded", 1, "dapo")],
)
async def test_replay_repeats_each_step_of_a_run(make_harness, tmp_path, type_, mini_batches, algorithm):
    schedule = {"type": type_, "miniBatches": mini_batches, "steps": 4}
    async with make_harness(schedule=schedule, algorithm={"type": algorithm, "groupSize": 4}) as harness:
        harness.judge = abstain_twice
        await harness.run()
        original = harness.metrics().steps
        _, replayed = await replay(harness, harness.job, tmp_path / "replay", [1, 2, 3, 4])
    assert [numbers(record) for record in replayed] == [numbers(record) for record in original]
    assert all(record.weight_digest for record in original)


async def test_replay_makes_the_same_calls_of_the_trainer(make_harness, tmp_path, monkeypatch):
    """Gradients of a call are summed in one order, and calls after each other: that decides the last bits."""
    calls, accumulate, take = [], FakeTrainer.accumulate, TrainLane.take

    async def record(self, rows, versions):
        calls.append([row.episode for row in rows])
        await accumulate(self, rows, versions)

    async def take_some(self, limit, wait_seconds=None):  # scores arrive one by one, or in pairs
        return await take(self, min(limit, 1 + len(calls) % 2), None if wait_seconds is None else 0.0)

    async with make_harness(schedule={"type": "bounded", "maxStaleness": 2, "steps": 3}) as harness:
        monkeypatch.setattr(FakeTrainer, "accumulate", record)
        monkeypatch.setattr(TrainLane, "take", take_some)
        monkeypatch.setattr(StepUpdates, "__setattr__", ignore_full_tokens, raising=False)
        await harness.run()
        monkeypatch.setattr(FakeTrainer, "accumulate", accumulate)
        trainer, _ = await replay(harness, harness.job, tmp_path / "replay", [1, 2, 3])
    assert len(calls) > 6, "a step has several calls"
    assert trainer.calls == calls


def ignore_full_tokens(self, name, value):
    """Each group fills a micro-batch."""
    object.__setattr__(self, name, 1 if name == "full_tokens" else value)


async def test_replay_from_a_checkpoint_repeats_the_later_steps(make_harness, tmp_path):
    async with make_harness() as harness:
        await harness.run()
        weight = int((harness.run_dir / "checkpoints" / "step-000004" / "trainer" / "weight").read_text())
        _, replayed = await replay(harness, harness.job, tmp_path / "replay", [5, 6], weight)
    assert [numbers(record) for record in replayed] == [numbers(record) for record in harness.metrics().steps[4:]]


async def test_other_algorithm_trains_on_the_same_rows_with_other_advantages(make_harness, tmp_path):
    async with make_harness(schedule={"steps": 2}) as harness:
        await harness.run()
        other = make_job(schedule={"steps": 2}, algorithm={"type": "rloo", "groupSize": 4})
        _, replayed = await replay(harness, other, tmp_path / "replay", [1, 2])
    before, now = (
        [group for step in (1, 2) for group in read_groups(trajectory_file(folder, step, "train"))]
        for folder in (harness.run_dir, tmp_path / "replay")
    )
    pairs = [pair for a, b in zip(before, now, strict=True) for pair in zip(a.episodes, b.episodes, strict=True)]
    assert all((a.segments[0].token_ids == b.segments[0].token_ids).all() for a, b in pairs)
    assert any(a.advantage != b.advantage for a, b in pairs)
    assert [r.weight_digest for r in replayed] != [r.weight_digest for r in harness.metrics().steps]


async def test_replay_of_a_replay_is_equal(make_harness, tmp_path):
    async with make_harness(schedule={"steps": 2}) as harness:
        await harness.run()
        _, first = await replay(harness, harness.job, tmp_path / "first", [1, 2])
        harness.run_dir = tmp_path / "first"
        _, second = await replay(harness, harness.job, tmp_path / "second", [1, 2])
    assert [numbers(record) for record in first] == [numbers(record) for record in second]
