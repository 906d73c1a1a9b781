"""The driver and its trainers die, are stopped and restart. The history must equal that of an undisturbed run."""

import asyncio
import random

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.wire.driver_status import HungPart
from rljob_trainer.driver.ports import TrainerGroupDiedError
from tests.support.driver_harness import run_undisturbed, stop_when, wait_until


def steps_of(metrics):
    """Return the steps, and the sorted steps of evaluations, which end some time after them."""
    return [record.step for record in metrics.steps], sorted(record.step for record in metrics.evaluations)


def samples_of(trajectories):
    """Return the columns that do not depend on time, weights and retries."""
    return {
        key: (row.prompt_index, row.completion, row.score, row.advantage, row.rewards[0].components)
        for key, row in trajectories.items()
    }


@pytest.mark.parametrize("seed", range(3))
async def test_trainer_group_death_at_any_moment_changes_nothing(make_harness, seed):
    expected = await run_undisturbed(make_harness)
    draw = random.Random(seed)
    async with make_harness() as harness:
        harness.kill_trainer = lambda what: draw.random() < 0.06
        summary = await harness.run()
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert summary.step_rewards == expected.summary.step_rewards
    assert harness.final_weight() == expected.final_weight
    assert steps_of(harness.metrics()) == steps_of(expected.metrics)
    assert len(expected.trajectories) == 6 * 4 * 4 + 2 * 4, "six steps of 4 x 4 samples, two evaluations of 4 prompts"
    assert samples_of(harness.trajectories()) == samples_of(expected.trajectories)
    assert len(set(harness.generations)) == len(harness.generations) == summary.restarts["trainer"] + 1


async def test_trainer_group_death_before_weights_are_fetched_restarts_the_group(make_harness):
    expected = await run_undisturbed(make_harness)
    async with make_harness() as harness:

        def withhold(manifest):
            """Return True if version 3 of the first group can no longer be fetched: its rank 0 is dead."""
            generations = harness.generations
            is_dead = manifest.version == 3 and manifest.generation == generations[0] and len(generations) == 1
            if is_dead:
                harness.trainer_died.set()
            return is_dead

        harness.withhold = withhold
        summary = await harness.run()
    assert len(harness.generations) == 2
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert harness.final_weight() == expected.final_weight


@pytest.mark.parametrize("seed", range(3))
async def test_driver_killed_at_any_moment_resumes_exactly(make_harness, seed):
    expected = await run_undisturbed(make_harness)
    draw = random.Random(seed)
    num_drivers = 0
    async with make_harness() as harness:
        while True:
            num_drivers += 1
            async with harness.driver() as driver:
                task = asyncio.create_task(driver.run())
                dies_after = draw.randrange(5, 95) if num_drivers < 6 else 10**9
                start = len(harness.requests)
                await wait_until(lambda: task.done() or len(harness.requests) - start >= dies_after)  # noqa: B023
                is_finished = task.done()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if is_finished:
                break
        summary = harness.summary()
    assert num_drivers > 1, "this test must kill the driver at least once"
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert summary.accuracy_before == expected.summary.accuracy_before
    assert summary.rewards_served == expected.summary.rewards_served
    assert harness.final_weight() == expected.final_weight
    assert steps_of(harness.metrics()) == steps_of(expected.metrics)


async def test_stopped_driver_saves_steps_since_last_checkpoint(make_harness):
    expected = await run_undisturbed(make_harness, checkpoint={"everySteps": 5})
    async with make_harness(checkpoint={"everySteps": 5}) as harness:
        await stop_when(harness, lambda: harness.board.status.step == 3)
        assert (harness.run_dir / "checkpoints" / "step-000003" / "COMPLETE").exists()
        assert len(harness.updates) == 3
        summary = await harness.run()
    assert len(harness.updates) == 6, "no step is repeated"
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert summary.step_rewards == expected.summary.step_rewards
    assert harness.final_weight() == expected.final_weight


async def test_driver_stopped_between_updates_of_a_step_saves_nothing(make_harness):
    async with make_harness(schedule={"steps": 3, "miniBatches": 2}, checkpoint={"everySteps": 5}) as harness:

        def stop(what):
            if what == "after update" and len(harness.updates) == 3:
                asyncio.current_task().cancel()

        harness.kill_trainer = stop
        await stop_when(harness, lambda: False)
        assert len(harness.updates) == 3
        assert not list(harness.run_dir.glob("checkpoints/*/COMPLETE")), "those weights belong to no step"
        harness.kill_trainer = lambda what: False
        summary = await harness.run()
    assert len(summary.prompts_trained) == 3


async def test_interrupted_evaluation_runs_after_restart(make_harness):
    settings = {"schedule": {"steps": 4}, "checkpoint": {"everySteps": 4}, "evaluation": {"everySteps": 2}}
    expected = await run_undisturbed(make_harness, **settings)
    async with make_harness(**settings) as harness:
        await stop_when(harness, lambda: any("/eval/2/" in body["id"] for body in harness.requests))
        await harness.run()
    assert steps_of(harness.metrics()) == steps_of(expected.metrics)
    assert harness.final_weight() == expected.final_weight


async def test_last_checkpoint_that_fails_does_not_delay_the_exit(make_harness):
    async with make_harness(checkpoint={"everySteps": 5}) as harness:
        harness.kill_trainer = lambda what: what == "save"
        await stop_when(harness, lambda: harness.board.status.step == 1)
        assert not list(harness.run_dir.glob("checkpoints/*/COMPLETE"))


async def test_trainer_group_that_keeps_dying_ends_the_job(make_harness):
    async with make_harness(trainer={"backoffLimit": 2}) as harness:
        harness.kill_trainer = lambda what: what == "update"
        with pytest.raises(TransientError, match=r"died 3 times within 21600 s, and spec.trainer.backoffLimit is 2"):
            await harness.run()
        status = harness.board.snapshot()
    assert len(harness.generations) == 3
    assert (status.rank_failures.count, status.rank_failures.last) == (3, "a rank died during update")


async def test_trainer_group_that_keeps_losing_nodes_continues(make_harness):
    """A drain of the trainers' nodes, one after the other, is not the job's failure."""
    expected = await run_undisturbed(make_harness)
    async with make_harness(trainer={"backoffLimit": 2}) as harness:
        deaths = []
        harness.loses_node = True
        harness.kill_trainer = lambda what: what == "update" and len(deaths) < 7 and not deaths.append(what)
        summary = await harness.run()
        status = harness.board.snapshot()
    assert (summary.restarts["trainer"], status.restarts["trainer"], status.rank_failures.count) == (7, 7, 0)
    assert harness.final_weight() == expected.final_weight


async def test_restarts_count_from_zero_in_each_head_job(make_harness):
    """A new head Job starts on resume after suspension, or on a retry by the user."""
    async with make_harness(trainer={"backoffLimit": 1}) as harness:
        deaths = []

        def die_once():
            deaths[:] = [1]
            harness.kill_trainer = lambda what: what == "update" and bool(deaths) and bool(deaths.pop())

        die_once()
        await stop_when(harness, lambda: not deaths and harness.board.status.step == 3, head_job_uid="a")
        die_once()
        await stop_when(harness, lambda: not deaths and harness.board.status.step == 5, head_job_uid="a")
        assert harness.board.snapshot().restarts == {"trainer": 2}
        assert harness.board.snapshot().rank_failures.count == 1, "the operator adds those of earlier drivers"
        die_once()
        async with harness.driver("b") as driver:
            await driver.run()
        assert harness.summary().restarts == {"trainer": 1}


async def test_finished_run_that_is_restarted_repeats_nothing(make_harness):
    async with make_harness(schedule={"steps": 2}) as harness:
        first = await harness.run()
        num_requests = len(harness.requests)
        second = await harness.run()
    assert len(harness.requests) == num_requests
    assert first.prompts_trained == second.prompts_trained


def make_out_of_memory(harness, when):
    """Let the updates for which `when(number of steps)` holds run out of device memory."""

    def group_death(message):
        error = TrainerGroupDiedError(message)
        error.out_of_memory = "spec.trainer.microBatchTokens: a rank ran out of GPU memory"
        return error

    harness.group_death = group_death
    harness.kill_trainer = lambda what: what == "update" and when(harness.board.status.step)


async def test_update_that_once_lacks_device_memory_changes_nothing(make_harness):
    expected = await run_undisturbed(make_harness)
    async with make_harness() as harness:
        lacking = [2]
        make_out_of_memory(harness, lambda step: step in lacking and not lacking.remove(step))
        summary = await harness.run()
    assert summary.restarts["trainer"] == 1
    assert harness.final_weight() == expected.final_weight


async def test_update_that_lacks_device_memory_twice_is_a_user_error(make_harness):
    async with make_harness() as harness:
        make_out_of_memory(harness, lambda step: step == 2)
        with pytest.raises(UserError, match=r"^spec\.trainer\.microBatchTokens: a rank ran out"):
            await harness.run()
    assert len(harness.generations) == 2


async def test_a_hung_rank_is_shown_until_its_group_is_replaced(make_harness):
    part = HungPart(role="trainer", name="rank 1", seconds=70, limit_seconds=60, doing="in accumulate")
    async with make_harness() as harness:
        shown = []

        def kill(what):
            if what == "update" and len(harness.updates) == 2 and len(harness.generations) == 1:
                error = TrainerGroupDiedError("rank 1 hangs")
                error.hung = (part,)
                raise error
            return False

        async def before_start():
            shown.append(harness.board.snapshot().hung)

        harness.kill_trainer, harness.before_start = kill, before_start
        summary = await harness.run()
        assert shown == [[], [part]]
        assert harness.board.snapshot().hung == []
    assert summary.restarts["trainer"] == 1
    assert harness.board.status.rank_failures.last == "rank 1 hangs"


async def test_a_driver_that_waits_for_nobody_but_itself_ends(make_harness, monkeypatch, caplog):
    """A scored group is lost, as by a defect: no request is in flight, and no step can end."""

    async def never(self, limit, wait_seconds=None):
        await asyncio.Event().wait()

    monkeypatch.setattr("rljob_trainer.driver.train_lane.TrainLane.take", never)
    monkeypatch.setattr("rljob_trainer.driver.run._TICK_SECONDS", 0.01)
    async with make_harness(hangDetection={"minSeconds": 1, "maxSeconds": 1}) as harness:
        with pytest.raises(TransientError, match=r"the driver hangs: no step for \d+ s"):
            await harness.run()
    assert "take groups" in caplog.text or "rows" in caplog.text, "its tasks are in the log"


async def test_status_says_how_long_the_steps_take(make_harness):
    async with make_harness() as harness:
        await stop_when(harness, lambda: harness.board.status.step == 3)
        status = harness.board.snapshot()
        assert 0 <= status.since_step_seconds < status.step_limit_seconds == 60
