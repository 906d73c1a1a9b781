"""What the wall time of a run went into, over the drivers and trainer groups that it had."""

import asyncio
import time

import pytest

from rljob_api.wire.driver_status import HungPart
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.history.run_time import read_run_time, write_run_time
from tests.support.driver_harness import stop_when


def check_partition(harness, summary, began):
    """All time from the run's begin to the last record is trained or lost, as /status and metrics.jsonl say."""
    found, status = read_run_time(harness.run_dir), harness.board.status
    total = found.trained + sum(found.lost.values())
    assert began <= found.until - total <= began + 5, "it begins with the first driver"
    assert found.until <= time.time()
    assert (status.training_share, status.lost_seconds) == (found.share, found.lost)
    of_steps = [{**step.phase_seconds, "evaluate": 0.0, "checkpoint": 0.0} for step in harness.metrics().steps]
    of_steps[0]["starting"] = 0.0
    assert found.trained >= sum(sum(phases.values()) for phases in of_steps) - 1e-6, "of all steps that count"
    assert 0 < summary.training_share <= 1
    last = harness.metrics().steps[-1]
    assert 0 < last.training_share <= 1
    assert set(last.lost_seconds) <= set(found.lost)
    return found.lost


async def test_an_undisturbed_run_loses_its_start_evaluations_and_checkpoints(make_harness):
    began = time.time()
    async with make_harness() as harness:
        lost = check_partition(harness, await harness.run(), began)
        text = harness.prometheus.render().decode()
    assert {"start", "checkpoint"} <= set(lost) <= {"start", "checkpoint", "evaluation"}
    assert 'rljob_step_lost_seconds{cause="start"}' in text
    assert "rljob_step_training_share " in text


async def test_steps_that_a_dead_group_repeats_are_lost(make_harness):
    began = time.time()
    async with make_harness() as harness:
        harness.kill_trainer = lambda what: len(harness.generations) == 1 and harness.board.status.step == 3
        lost = check_partition(harness, await harness.run(), began)
    assert lost["restart"] > 0
    assert "queue" not in lost


@pytest.mark.parametrize(("has_ended", "cause"), [(True, "queue"), (False, "restart")])
async def test_time_until_the_next_driver_is_of_a_queue_or_of_a_restart(make_harness, has_ended, cause):
    began = time.time() - 1000
    async with make_harness() as harness:
        await stop_when(harness, lambda: harness.board.status.step == 3)
        found = read_run_time(harness.run_dir)
        assert found.has_ended, "it was stopped, as for a suspension"
        write_run_time(harness.run_dir, found.model_copy(update={"has_ended": has_ended, "until": found.until - 1000}))
        lost = check_partition(harness, await harness.run(), began)
    assert 1000 <= lost[cause] < 1060


async def test_an_outage_is_lost_as_far_as_training_waits(make_harness):
    async with make_harness() as harness:

        def judge(reward, body):
            """In the third step a service fails, and answers again 1,000 s later."""
            if harness.board.status.step == 2 and not away.has_answered:
                away.succeeded()
                away.failed("it is away")
                now = harness.outages.now
                harness.outages.now = lambda: now() + 1000
                away.succeeded()

        async with harness.driver() as driver:
            away, harness.judge = harness.outages.watch("a service"), judge
            await driver.run()
        third = harness.metrics().steps[2].phase_seconds
    trains = third.pop("update") + third.pop("publish", 0.0)
    lost = read_run_time(harness.run_dir).lost
    assert trains > 0
    assert lost["outage"] == pytest.approx(sum(third.values()))


async def test_a_rank_that_hangs_is_no_restart_while_it_hangs(make_harness):
    def die(message):
        error = TrainerGroupDiedError(message)
        error.hung = (HungPart(role="trainer", name="rank 1", seconds=1e6, limit_seconds=60),)
        return error

    began = time.time()
    async with make_harness() as harness:
        harness.group_death = die
        harness.kill_trainer = lambda what: len(harness.generations) == 1 and harness.board.status.step == 3
        lost = check_partition(harness, await harness.run(), began)
    assert lost["hung"] > 0


async def test_a_driver_that_hangs_is_in_no_queue_until_it_is_replaced(make_harness):
    async with make_harness() as harness:
        async with harness.driver() as driver:

            async def hang():
                if harness.board.status.step == 2:
                    driver._loop.ledger.clock.lose_hung(1e6)
                    raise asyncio.CancelledError  # as the watcher of steps does

            harness.before_apply = hang
            with pytest.raises(asyncio.CancelledError):
                await driver.run()
        found = read_run_time(harness.run_dir)
    assert found.lost["hung"] > 0
    assert not found.has_ended
