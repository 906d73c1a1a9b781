"""The driver and its trainers die, are stopped and start again. What must hold: the history is that of an undisturbed
run."""

import asyncio
import random

import pytest

from rljob_api.errors import TransientError
from tests.support.driver_harness import run_undisturbed, stop_when, wait_until


@pytest.mark.parametrize("seed", range(6))
async def test_a_trainer_group_that_dies_at_any_moment_changes_nothing(make_world, seed):
    undisturbed, expected = await run_undisturbed(make_world)
    draw = random.Random(seed)
    async with make_world() as world:
        world.kill_trainer = lambda what: draw.random() < 0.06
        summary = await world.run()
    assert summary["prompts_trained"] == expected["prompts_trained"]
    assert summary["step_rewards"] == expected["step_rewards"]
    assert world.final_weight() == undisturbed.final_weight()
    assert [(m["type"], m["step"]) for m in world.metrics()] == [(m["type"], m["step"]) for m in undisturbed.metrics()]
    assert len(set(world.generations)) == len(world.generations) == summary["restarts"]["trainer"] + 1


async def test_a_trainer_group_that_dies_before_its_weights_are_fetched_is_not_waited_for(make_world):
    undisturbed, expected = await run_undisturbed(make_world)
    async with make_world() as world:

        def withhold(manifest):
            """No rollout can fetch version 3 of the first group: its rank 0 is gone."""
            gone = manifest.version == 3 and manifest.generation == world.generations[0] and len(world.generations) == 1
            if gone:
                world.trainer_is_gone.set()
            return gone

        world.withhold = withhold
        summary = await world.run()
    assert len(world.generations) == 2
    assert summary["prompts_trained"] == expected["prompts_trained"]
    assert world.final_weight() == undisturbed.final_weight()


@pytest.mark.parametrize("seed", range(6))
async def test_a_driver_killed_at_any_moment_resumes_exactly(make_world, seed):
    undisturbed, expected = await run_undisturbed(make_world)
    draw = random.Random(seed)
    num_lives = 0
    async with make_world() as world:
        while True:
            num_lives += 1
            async with world.driver() as driver:
                task = asyncio.create_task(driver.run())
                dies_after = draw.randrange(5, 95) if num_lives < 6 else 10**9
                start = len(world.requests)
                await wait_until(lambda: task.done() or len(world.requests) - start >= dies_after)  # noqa: B023
                finished = task.done()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if finished:
                break
        summary = world.summary()
    assert num_lives > 1, "this test must kill it at least once"
    assert summary["prompts_trained"] == expected["prompts_trained"]
    assert summary["accuracy_before"] == expected["accuracy_before"]
    assert summary["rewards_served"] == expected["rewards_served"]
    assert world.final_weight() == undisturbed.final_weight()
    assert [(m["type"], m["step"]) for m in world.metrics()] == [(m["type"], m["step"]) for m in undisturbed.metrics()]


async def test_a_driver_that_is_stopped_saves_the_steps_since_the_last_checkpoint(make_world):
    undisturbed, expected = await run_undisturbed(make_world, checkpoint={"everySteps": 5})
    async with make_world(checkpoint={"everySteps": 5}) as world:
        await stop_when(world, lambda: world.board.status.step == 3 and world.board.status.phase == "generate")
        assert (world.run_dir / "checkpoints" / "step-000003" / "COMPLETE").exists()
        num_updates = len(world.updates)
        assert num_updates == 3
        summary = await world.run()
    assert len(world.updates) == 6, "no step is done twice"
    assert summary["prompts_trained"] == expected["prompts_trained"]
    assert summary["step_rewards"] == expected["step_rewards"]
    assert world.final_weight() == undisturbed.final_weight()


async def test_a_driver_that_is_stopped_between_two_updates_of_a_step_saves_nothing(make_world):
    async with make_world(schedule={"steps": 3, "miniBatches": 2}, checkpoint={"everySteps": 5}) as world:

        def stop(what):
            if what == "after update" and len(world.updates) == 3:
                asyncio.current_task().cancel()

        world.kill_trainer = stop
        await stop_when(world, lambda: False)
        assert len(world.updates) == 3
        assert not list(world.run_dir.glob("checkpoints/*/COMPLETE")), "those weights are of no step"
        world.kill_trainer = lambda what: False
        summary = await world.run()
    assert len(summary["prompts_trained"]) == 3


async def test_an_evaluation_that_the_stop_interrupts_is_made_up_for(make_world):
    settings = {"schedule": {"steps": 4}, "checkpoint": {"everySteps": 4}, "evaluation": {"everySteps": 2}}
    undisturbed, _ = await run_undisturbed(make_world, **settings)
    async with make_world(**settings) as world:
        await stop_when(world, lambda: world.board.status.step == 2 and world.board.status.phase == "evaluate")
        assert (world.run_dir / "checkpoints" / "step-000002" / "COMPLETE").exists()
        await world.run()
    assert [(m["type"], m["step"]) for m in world.metrics()] == [(m["type"], m["step"]) for m in undisturbed.metrics()]
    assert world.final_weight() == undisturbed.final_weight()


async def test_a_last_checkpoint_that_cannot_be_written_does_not_hold_up_the_end(make_world):
    async with make_world(checkpoint={"everySteps": 5}) as world:
        world.kill_trainer = lambda what: what == "save"
        await stop_when(world, lambda: world.board.status.step == 1)
        assert not list(world.run_dir.glob("checkpoints/*/COMPLETE"))


async def test_a_trainer_that_keeps_dying_ends_the_job_in_the_end(make_world):
    async with make_world(trainer={"backoffLimit": 2}) as world:
        world.kill_trainer = lambda what: what == "update"
        with pytest.raises(TransientError, match=r"died 3 times and spec.trainer.backoffLimit is 2"):
            await world.run()
    assert len(world.generations) == 3


async def test_restarts_count_from_zero_in_another_life_of_the_job(make_world):
    """Suspend and resume, or a retry: somebody has looked at the job."""
    async with make_world(trainer={"backoffLimit": 1}) as world:
        deaths = []

        def die_once():
            deaths[:] = [1]
            world.kill_trainer = lambda what: what == "update" and bool(deaths) and bool(deaths.pop())

        die_once()
        await stop_when(world, lambda: not deaths and world.board.status.step == 3, life="a")
        die_once()
        async with world.driver("a") as driver:
            with pytest.raises(TransientError, match="died 2 times"):
                await driver.run()
        die_once()
        async with world.driver("b") as driver:
            await driver.run()
        assert world.summary()["restarts"] == {"trainer": 1}


async def test_a_finished_run_that_is_started_again_does_nothing_twice(make_world):
    async with make_world(schedule={"steps": 2}) as world:
        first = await world.run()
        num_requests = len(world.requests)
        second = await world.run()
    assert len(world.requests) == num_requests
    assert first["prompts_trained"] == second["prompts_trained"]
