"""The driver and its trainers die, are stopped and start again. What must hold: the history is that of an undisturbed
run."""

import asyncio
import random

import pytest

from rljob_api.errors import TransientError
from tests.support.driver_harness import run_undisturbed, stop_when, wait_until


@pytest.mark.parametrize("seed", range(6))
async def test_a_trainer_group_that_dies_at_any_moment_changes_nothing(make_harness, seed):
    undisturbed, expected = await run_undisturbed(make_harness)
    draw = random.Random(seed)
    async with make_harness() as harness:
        harness.kill_trainer = lambda what: draw.random() < 0.06
        summary = await harness.run()
    assert summary["prompts_trained"] == expected["prompts_trained"]
    assert summary["step_rewards"] == expected["step_rewards"]
    assert harness.final_weight() == undisturbed.final_weight()
    assert [(m["type"], m["step"]) for m in harness.metrics()] == [
        (m["type"], m["step"]) for m in undisturbed.metrics()
    ]
    assert len(set(harness.generations)) == len(harness.generations) == summary["restarts"]["trainer"] + 1


async def test_a_trainer_group_that_dies_before_its_weights_are_fetched_is_not_waited_for(make_harness):
    undisturbed, expected = await run_undisturbed(make_harness)
    async with make_harness() as harness:

        def withhold(manifest):
            """No rollout can fetch version 3 of the first group: its rank 0 is gone."""
            gone = (
                manifest.version == 3
                and manifest.generation == harness.generations[0]
                and len(harness.generations) == 1
            )
            if gone:
                harness.trainer_died.set()
            return gone

        harness.withhold = withhold
        summary = await harness.run()
    assert len(harness.generations) == 2
    assert summary["prompts_trained"] == expected["prompts_trained"]
    assert harness.final_weight() == undisturbed.final_weight()


@pytest.mark.parametrize("seed", range(6))
async def test_a_driver_killed_at_any_moment_resumes_exactly(make_harness, seed):
    undisturbed, expected = await run_undisturbed(make_harness)
    draw = random.Random(seed)
    num_lives = 0
    async with make_harness() as harness:
        while True:
            num_lives += 1
            async with harness.driver() as driver:
                task = asyncio.create_task(driver.run())
                dies_after = draw.randrange(5, 95) if num_lives < 6 else 10**9
                start = len(harness.requests)
                await wait_until(lambda: task.done() or len(harness.requests) - start >= dies_after)  # noqa: B023
                finished = task.done()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if finished:
                break
        summary = harness.summary()
    assert num_lives > 1, "this test must kill it at least once"
    assert summary["prompts_trained"] == expected["prompts_trained"]
    assert summary["accuracy_before"] == expected["accuracy_before"]
    assert summary["rewards_served"] == expected["rewards_served"]
    assert harness.final_weight() == undisturbed.final_weight()
    assert [(m["type"], m["step"]) for m in harness.metrics()] == [
        (m["type"], m["step"]) for m in undisturbed.metrics()
    ]


async def test_a_driver_that_is_stopped_saves_the_steps_since_the_last_checkpoint(make_harness):
    undisturbed, expected = await run_undisturbed(make_harness, checkpoint={"everySteps": 5})
    async with make_harness(checkpoint={"everySteps": 5}) as harness:
        await stop_when(harness, lambda: harness.board.status.step == 3 and harness.board.status.phase == "generate")
        assert (harness.run_dir / "checkpoints" / "step-000003" / "COMPLETE").exists()
        num_updates = len(harness.updates)
        assert num_updates == 3
        summary = await harness.run()
    assert len(harness.updates) == 6, "no step is done twice"
    assert summary["prompts_trained"] == expected["prompts_trained"]
    assert summary["step_rewards"] == expected["step_rewards"]
    assert harness.final_weight() == undisturbed.final_weight()


async def test_a_driver_that_is_stopped_between_two_updates_of_a_step_saves_nothing(make_harness):
    async with make_harness(schedule={"steps": 3, "miniBatches": 2}, checkpoint={"everySteps": 5}) as harness:

        def stop(what):
            if what == "after update" and len(harness.updates) == 3:
                asyncio.current_task().cancel()

        harness.kill_trainer = stop
        await stop_when(harness, lambda: False)
        assert len(harness.updates) == 3
        assert not list(harness.run_dir.glob("checkpoints/*/COMPLETE")), "those weights are of no step"
        harness.kill_trainer = lambda what: False
        summary = await harness.run()
    assert len(summary["prompts_trained"]) == 3


async def test_an_evaluation_that_the_stop_interrupts_is_made_up_for(make_harness):
    settings = {"schedule": {"steps": 4}, "checkpoint": {"everySteps": 4}, "evaluation": {"everySteps": 2}}
    undisturbed, _ = await run_undisturbed(make_harness, **settings)
    async with make_harness(**settings) as harness:
        await stop_when(harness, lambda: harness.board.status.step == 2 and harness.board.status.phase == "evaluate")
        assert (harness.run_dir / "checkpoints" / "step-000002" / "COMPLETE").exists()
        await harness.run()
    assert [(m["type"], m["step"]) for m in harness.metrics()] == [
        (m["type"], m["step"]) for m in undisturbed.metrics()
    ]
    assert harness.final_weight() == undisturbed.final_weight()


async def test_a_last_checkpoint_that_cannot_be_written_does_not_hold_up_the_end(make_harness):
    async with make_harness(checkpoint={"everySteps": 5}) as harness:
        harness.kill_trainer = lambda what: what == "save"
        await stop_when(harness, lambda: harness.board.status.step == 1)
        assert not list(harness.run_dir.glob("checkpoints/*/COMPLETE"))


async def test_a_trainer_that_keeps_dying_ends_the_job_in_the_end(make_harness):
    async with make_harness(trainer={"backoffLimit": 2}) as harness:
        harness.kill_trainer = lambda what: what == "update"
        with pytest.raises(TransientError, match=r"died 3 times and spec.trainer.backoffLimit is 2"):
            await harness.run()
    assert len(harness.generations) == 3


async def test_restarts_count_from_zero_in_another_life_of_the_job(make_harness):
    """Suspend and resume, or a retry: somebody has looked at the job."""
    async with make_harness(trainer={"backoffLimit": 1}) as harness:
        deaths = []

        def die_once():
            deaths[:] = [1]
            harness.kill_trainer = lambda what: what == "update" and bool(deaths) and bool(deaths.pop())

        die_once()
        await stop_when(harness, lambda: not deaths and harness.board.status.step == 3, head_job_uid="a")
        die_once()
        async with harness.driver("a") as driver:
            with pytest.raises(TransientError, match="died 2 times"):
                await driver.run()
        die_once()
        async with harness.driver("b") as driver:
            await driver.run()
        assert harness.summary()["restarts"] == {"trainer": 1}


async def test_a_finished_run_that_is_started_again_does_nothing_twice(make_harness):
    async with make_harness(schedule={"steps": 2}) as harness:
        first = await harness.run()
        num_requests = len(harness.requests)
        second = await harness.run()
    assert len(harness.requests) == num_requests
    assert first["prompts_trained"] == second["prompts_trained"]
