"""Checkpoints that are written while training continues."""

import asyncio
import errno

import pytest

from rljob_trainer.driver.checkpointer import Checkpointer, Exporter
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.history.run_state import History, checkpoint_exists
from tests.support.driver_harness import wait_until


class Writer:
    """A trainer whose copies are written once the gate is open."""

    def __init__(self):
        self.gate, self.failure = asyncio.Event(), None
        self.folders, self.num_writing = [], 0

    async def save(self, folder):
        self.folders.append(folder.name)

    async def saved(self):
        self.num_writing += 1
        assert self.num_writing == 1, "two checkpoints at once"
        await self.gate.wait()
        self.num_writing -= 1
        if self.failure is not None:
            raise self.failure
        return {}


@pytest.fixture
def writer():
    return Writer()


@pytest.fixture
def costs():
    return []


@pytest.fixture
def checkpointer(tmp_path, writer, costs):
    exporter = Exporter(tmp_path, writer, "never", tokenizer_source="", disk=RunDisk(tmp_path), record=None)
    return Checkpointer(tmp_path, writer, keep=1, record=costs.append, exporter=exporter, disk=RunDisk(tmp_path))


async def test_checkpoint_is_complete_once_the_ranks_have_written_it(tmp_path, checkpointer, writer, costs):
    await checkpointer.save(History(step=1))
    assert (checkpointer.step, checkpoint_exists(tmp_path, 1)) == (1, False)
    checkpointer.check()
    writer.gate.set()
    await checkpointer.wait()
    assert (checkpointer.step, checkpoint_exists(tmp_path, 1)) == (None, True)
    assert [cost.step for cost in costs] == [1]
    await checkpointer.wait()
    await checkpointer.close()


async def test_next_checkpoint_waits_for_the_one_before(tmp_path, checkpointer, writer, costs):
    await checkpointer.save(History(step=1))
    second = asyncio.create_task(checkpointer.save(History(step=2)))
    await asyncio.sleep(0)
    assert writer.folders == ["step-000001"]
    writer.gate.set()
    await second
    assert costs[0].step == 1
    await checkpointer.wait()
    assert writer.folders == ["step-000001", "step-000002"]
    assert not checkpoint_exists(tmp_path, 1), "one is kept"
    assert [cost.step for cost in costs] == [1, 2]


async def test_checkpoint_without_room_is_owed_and_the_next_one_is_waited_for(tmp_path, checkpointer, writer, costs):
    writer.gate.set()
    await checkpointer.save(History(step=1))
    await checkpointer.wait()
    writer.failure = OSError(errno.ENOSPC, "No space left on device")
    await checkpointer.save(History(step=2))
    await checkpointer.wait()
    assert (checkpointer.is_owed, checkpoint_exists(tmp_path, 1), checkpoint_exists(tmp_path, 2)) == (True, True, False)
    saving = asyncio.create_task(checkpointer.save(History(step=3)))
    await wait_until(lambda: writer.folders.count("step-000003") == 2)
    assert not saving.done()
    writer.failure = None
    await saving
    assert (checkpointer.is_owed, checkpoint_exists(tmp_path, 3)) == (False, True)
    assert [cost.step for cost in costs] == [1, 3]


async def test_failed_write_is_raised_later_and_removes_nothing(tmp_path, checkpointer, writer, costs, caplog):
    writer.gate.set()
    await checkpointer.save(History(step=1))
    await checkpointer.wait()
    writer.gate.clear()
    writer.failure = TrainerGroupDiedError("a trainer rank died (save)")
    await checkpointer.save(History(step=2))
    writer.gate.set()
    with pytest.raises(TrainerGroupDiedError, match="a trainer rank died"):
        await checkpointer.save(History(step=3))
    assert writer.folders == ["step-000001", "step-000002"]
    assert (checkpoint_exists(tmp_path, 1), checkpoint_exists(tmp_path, 2)) == (True, False)
    assert [cost.step for cost in costs] == [1]
    assert "the checkpoint of step 2 is not complete" in caplog.text


async def test_failed_write_is_found_by_a_check(checkpointer, writer):
    writer.failure = TrainerGroupDiedError("a trainer rank died (save)")
    await checkpointer.save(History(step=1))
    checkpointer.check()
    writer.gate.set()
    await asyncio.wait((checkpointer._writing,))
    with pytest.raises(TrainerGroupDiedError):
        checkpointer.check()
    checkpointer.check()


async def test_cancelled_wait_leaves_the_write_as_it_is(tmp_path, checkpointer, writer):
    await checkpointer.save(History(step=1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(checkpointer.wait(), 0)
    writer.gate.set()
    await checkpointer.close(30)
    assert checkpoint_exists(tmp_path, 1)


async def test_closed_one_gives_up_a_write_that_takes_too_long(tmp_path, checkpointer, writer, costs):
    await checkpointer.save(History(step=1))
    await checkpointer.close()
    assert (checkpointer.step, checkpoint_exists(tmp_path, 1), costs) == (None, False, [])
    writer.gate.set()
    await checkpointer.wait()
    assert not checkpoint_exists(tmp_path, 1)


class Storage:
    """Copies that take as long as the gate is closed."""

    def __init__(self, run_dir):
        self.run_dir, self.gate, self.newest, self.calls = run_dir, asyncio.Event(), None, []

    async def save(self, step, *, keep, others):
        self.calls.append((step, keep, set(others), checkpoint_exists(self.run_dir, step)))
        await self.gate.wait()
        self.newest = step


async def test_older_checkpoint_stays_until_the_copy_has_the_new_one(tmp_path, writer, costs):
    storage, disk = Storage(tmp_path), RunDisk(tmp_path)
    exporter = Exporter(tmp_path, writer, "never", tokenizer_source="", disk=disk, record=None)
    checkpoints = Checkpointer(
        tmp_path,
        writer,
        keep=1,
        record=costs.append,
        exporter=exporter,
        disk=disk,
        list_kept=lambda: {7},
        copies=storage,
    )
    writer.gate.set()
    storage.gate.set()
    await checkpoints.save(History(step=1))
    await checkpoints.wait()
    assert checkpoints.newest == 1
    storage.gate.clear()
    await checkpoints.save(History(step=2))
    await wait_until(lambda: len(storage.calls) == 2)
    assert storage.calls[1] == (2, 1, {7}, True)
    assert (checkpoint_exists(tmp_path, 1), checkpoints.newest) == (True, 1), "only the copy of step 1 counts"
    storage.gate.set()
    await checkpoints.wait()
    assert (checkpoint_exists(tmp_path, 1), checkpoints.newest) == (False, 2)
