"""The driver trains on while a checkpoint is written; what is saved is the state of its step."""

import asyncio
import errno
import json

import pytest

from rljob_api.errors import UserError
from rljob_trainer.outages import OutageError
from tests.support.driver_harness import run_undisturbed, stop_when, wait_until
from tests.support.waiting import DEADLINE_SECONDS


def complete_steps(harness):
    return sorted(int(file.parent.name[-6:]) for file in harness.run_dir.glob("checkpoints/*/COMPLETE"))


class Gate:
    """Holds the writes of checkpoints."""

    def __init__(self, harness):
        self.is_open, self.num_waiting = asyncio.Event(), 0
        harness.before_write = self._wait

    async def _wait(self):
        self.num_waiting += 1
        await self.is_open.wait()


async def test_training_continues_until_the_next_checkpoint_is_due(make_harness):
    expected = await run_undisturbed(make_harness)
    async with make_harness() as harness, harness.driver() as driver:
        gate = Gate(harness)
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or harness.board.status.step == 4)
        assert complete_steps(harness) == [], "that of step 2 is still written"
        assert harness.board.snapshot().phase != "done"
        gate.is_open.set()
        await asyncio.wait_for(running, DEADLINE_SECONDS)
        assert gate.num_waiting == 3
        assert complete_steps(harness) == [4, 6]
        assert harness.final_weight() == expected.final_weight
        assert harness.summary().prompts_trained == expected.summary.prompts_trained
        metrics = harness.prometheus.render().decode()
        assert "rljob_checkpoint_wait_seconds" in metrics
        assert "rljob_checkpoint_write_seconds" in metrics


async def test_saved_state_is_that_of_its_step_though_training_continued(make_harness):
    expected = await run_undisturbed(make_harness)
    async with make_harness() as harness:
        gate = Gate(harness)

        def is_later():
            if harness.board.status.step == 3:
                gate.is_open.set()
            return bool(complete_steps(harness))

        await stop_when(harness, is_later)
        saved = json.loads((harness.run_dir / "checkpoints" / "step-000002" / "driver.json").read_text())
        assert saved["step"] == 2
        for folder in harness.run_dir.glob("checkpoints/*"):  # as if the head had been lost then
            if folder.name != "step-000002":
                (folder / "COMPLETE").unlink(missing_ok=True)
        await harness.run()
        assert harness.final_weight() == expected.final_weight
        assert [step.step for step in harness.metrics().steps] == [1, 2, 3, 4, 5, 6]


async def test_job_ends_after_its_last_checkpoint_is_complete(make_harness):
    async with make_harness(schedule={"steps": 2}) as harness, harness.driver() as driver:
        gate = Gate(harness)
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or gate.num_waiting)
        assert harness.board.status.step == 2
        assert not (harness.run_dir / "export").exists(), "the export waits, too"
        gate.is_open.set()
        await asyncio.wait_for(running, DEADLINE_SECONDS)
        assert complete_steps(harness) == [2]


async def test_stopped_driver_waits_for_the_checkpoint_that_is_being_written(make_harness):
    async with make_harness() as harness, harness.driver() as driver:
        gate = Gate(harness)
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or harness.board.status.step == 3)
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        gate.is_open.set()
        await asyncio.gather(running, return_exceptions=True)
        assert complete_steps(harness)[0] == 2


async def test_full_disk_is_waited_for_and_costs_nothing(make_harness):
    """The checkpoint of step 4 is owed: that of step 5 is saved in its place, and training waits for it."""
    expected = await run_undisturbed(make_harness)
    async with make_harness() as harness, harness.driver() as driver:
        is_full, num_failed = True, 0

        async def fail():
            nonlocal num_failed
            if harness.board.status.step >= 4 and is_full:
                num_failed += 1
                raise OSError(errno.ENOSPC, "No space left on device")

        harness.before_write = fail
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or num_failed > 1)
        assert (complete_steps(harness), harness.board.status.step) == ([2], 5)
        is_full = False
        await asyncio.wait_for(running, DEADLINE_SECONDS)
        assert complete_steps(harness) == [5, 6]
        assert [step.step for step in harness.metrics().steps] == [1, 2, 3, 4, 5, 6]
        assert harness.trajectories().keys() == expected.trajectories.keys()
        assert harness.final_weight() == expected.final_weight


async def test_disk_that_stays_full_ends_the_job_and_names_the_remedy(make_harness):
    async with make_harness(outageSeconds=2) as harness, harness.driver() as driver:

        async def fail():
            raise OSError(errno.EROFS, "Read-only file system")

        harness.before_write = fail
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or harness.disk_waits())
        assert "Read-only file system" in harness.disk_waits()
        with pytest.raises(OutageError, match=r"^spec.checkpoint .*Read-only file system .*GiB free.*free space on"):
            await running


async def test_failure_of_the_job_waits_for_the_checkpoint_before(make_harness):
    """The trainers still run, and the fixed job resumes from there."""
    async with make_harness() as harness:
        gate = Gate(harness)

        def fail(what):
            if harness.board.status.step == 3 and what == "accumulate":
                asyncio.get_running_loop().call_soon(gate.is_open.set)
                raise UserError("a trainer rank ran out of memory")

        harness.kill_trainer = fail
        with pytest.raises(UserError, match="out of memory"):
            await harness.run()
        assert complete_steps(harness) == [2]


async def test_group_that_dies_while_it_writes_resumes_from_the_checkpoint_before(make_harness):
    expected = await run_undisturbed(make_harness)
    async with make_harness() as harness:
        deaths = []
        harness.kill_trainer = lambda what: (
            what == "write" and harness.board.status.step >= 4 and not deaths and not deaths.append(what)
        )
        summary = await harness.run()
        assert deaths == ["write"]
        assert summary.restarts["trainer"] == 1
        assert summary.prompts_trained == expected.summary.prompts_trained
        assert harness.final_weight() == expected.final_weight
