"""What a driver saves when its Pod, or a trainer's Pod, is terminated; and what it says about the rest."""

import asyncio

import pytest

from rljob_api.run.folder import complete_checkpoints
from rljob_trainer.driver.stopping import NOTHING_TRAINS
from tests.support.driver_harness import run_undisturbed, wait_until
from tests.support.waiting import DEADLINE_SECONDS

RARELY = {"checkpoint": {"everySteps": 5}}


class Gate:
    """Holds the update of one step."""

    def __init__(self, harness, step):
        self.is_open, self.is_reached = asyncio.Event(), asyncio.Event()
        self._harness, self._step = harness, step
        harness.before_apply = self._wait

    async def _wait(self):
        if self._harness.board.status.step == self._step - 1:
            self.is_reached.set()
            await self.is_open.wait()


async def stop(running):
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def steps_saved(harness):
    return list(complete_checkpoints(harness.run_dir))


async def test_update_that_has_begun_counts_and_is_saved(make_harness):
    expected = await run_undisturbed(make_harness, **RARELY)
    async with make_harness(**RARELY) as harness:
        gate = Gate(harness, 3)
        async with harness.driver() as driver:
            running = asyncio.create_task(driver.run())
            await gate.is_reached.wait()
            stopping = asyncio.create_task(stop(running))
            await asyncio.sleep(0)
            assert not running.done()
            gate.is_open.set()
            await stopping
            assert driver.exit_report == "step 3 is saved"
        assert steps_saved(harness) == [3]
        summary = await harness.run()
    assert len(harness.updates) == 6, "no step is repeated"
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert harness.final_weight() == expected.final_weight


async def test_update_that_does_not_end_in_time_is_reported(make_harness, caplog):
    async with make_harness() as harness:
        gate = Gate(harness, 4)
        async with harness.driver(grace_seconds=0.2) as driver:
            running = asyncio.create_task(driver.run())
            await gate.is_reached.wait()
            await stop(running)
            assert (
                driver.exit_report == "steps after 2 are not saved: step 4 was being applied, and did not end in time"
            )
            assert driver.exit_report in caplog.text
        assert steps_saved(harness) == [2]


async def test_checkpoint_that_does_not_fit_is_not_begun(make_harness):
    async with make_harness(**RARELY) as harness, harness.driver() as driver:
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or harness.board.status.step == 2)
        driver._checkpoint_seconds = 31
        await stop(running)
        assert driver.exit_report.endswith("the last checkpoint took 31 s, and there are 30 s for one")
        assert driver.exit_report.startswith("steps after 0 are not saved")
        assert steps_saved(harness) == []


async def test_checkpoint_that_is_begun_is_not_written_twice(make_harness):
    async with make_harness() as harness, harness.driver() as driver:
        is_open, num_writes = asyncio.Event(), 0

        async def write():
            nonlocal num_writes
            num_writes += 1
            await is_open.wait()

        harness.before_write = write
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or num_writes == 1)
        stopping = asyncio.create_task(stop(running))
        await asyncio.sleep(0)
        is_open.set()
        await stopping
        assert steps_saved(harness)[0] == 2
        assert num_writes == len(steps_saved(harness))


async def test_driver_that_is_stopped_before_its_first_step_says_so(make_harness):
    async with make_harness() as harness, harness.driver() as driver:
        assert driver.exit_report == NOTHING_TRAINS
        assert await driver.leave() == NOTHING_TRAINS
        harness.withhold = lambda manifest: True
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or harness.published is not None)
        await stop(running)
        assert driver.exit_report == "no step has ended"


async def test_trainer_pod_that_leaves_ends_after_its_steps_are_saved(make_harness):
    expected = await run_undisturbed(make_harness, **RARELY)
    async with make_harness(**RARELY) as harness:
        harness.loses_node, left = True, []

        async def leave():
            await wait_until(lambda: harness.board.status.step == 3)
            left.append(await asyncio.gather(driver.leave(), driver.leave()))
            left.append(steps_saved(harness))
            harness.trainer_died.set()

        async with harness.driver() as driver:
            leaving = asyncio.create_task(leave())
            await asyncio.wait_for(driver.run(), DEADLINE_SECONDS)
            await leaving
        [[report, same], saved] = left
        assert report == same
        assert report == f"step {saved[-1]} is saved"
        assert saved[-1] >= 3
        assert len(harness.generations) == 2, "the next group resumes"
        assert harness.board.status.rank_failures.count == 0, "no rank has failed"
        summary = harness.summary()
    assert len(harness.updates) == 6, "no step is repeated"
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert harness.final_weight() == expected.final_weight


@pytest.mark.parametrize("what", ["dies", "ends"])
async def test_pod_that_leaves_gets_an_answer_whatever_happens(make_harness, what):
    async with make_harness(schedule={"steps": 2}) as harness, harness.driver() as driver:
        gate = Gate(harness, 2)
        running = asyncio.create_task(driver.run())
        await gate.is_reached.wait()
        leaving = asyncio.create_task(driver.leave())
        await asyncio.sleep(0)
        if what == "dies":
            harness.trainer_died.set()
        gate.is_open.set()
        harness.trainer_died.set()
        assert await asyncio.wait_for(leaving, DEADLINE_SECONDS)
        await stop(running)


async def test_head_that_is_told_to_end_after_a_trainer_pod_saves_nevertheless(make_harness):
    """As when a job is suspended, whose Pods are terminated at about the same time."""
    async with make_harness(**RARELY) as harness, harness.driver() as driver:
        is_writing, is_open = asyncio.Event(), asyncio.Event()

        async def write():
            is_writing.set()
            await is_open.wait()

        harness.before_write = write
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or harness.board.status.step == 3)
        leaving = asyncio.create_task(driver.leave())
        await is_writing.wait()
        stopping = asyncio.create_task(stop(running))
        await asyncio.sleep(0)
        assert not running.done()
        is_open.set()
        await stopping
        [saved] = steps_saved(harness)
        assert await leaving == driver.exit_report == f"step {saved} is saved"
        assert len(harness.generations) == 1, "no other group starts"
