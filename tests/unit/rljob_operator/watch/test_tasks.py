"""Task trees: no task outlives `cancel_all`, and none is cancelled while its parent lives."""

import asyncio

import pytest

from rljob_operator.watch import tasks
from rljob_operator.watch.tasks import TaskTree, run_uncancelled, wait_for_all
from tests.support.waiting import DEADLINE_SECONDS


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch):
    monkeypatch.setattr(tasks, "_RECANCEL_INTERVAL_SECONDS", 0.02)


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def run_forever():
    await asyncio.Event().wait()


async def test_orphans_of_a_failed_parent_are_cancelled():
    tree = TaskTree()

    async def fails():
        asyncio.create_task(run_forever())  # noqa: RUF006 - the case under test
        raise ValueError("a defect")

    async def root():
        return asyncio.create_task(fails())

    with pytest.raises(ValueError, match="a defect"):
        await (await tree.create_task(root()))
    assert len(tree.pending) == 1
    await tree.cancel_all()
    assert not tree.pending


async def test_child_is_left_to_its_living_parent():
    tree, cancelled, is_ended_in_order = TaskTree(), [], []

    async def child():
        try:
            await run_forever()
        except asyncio.CancelledError:
            cancelled.append(asyncio.current_task())
            raise

    async def parent():
        mine = asyncio.create_task(child())
        try:
            await run_forever()
        finally:
            await settle()
            is_ended_in_order.append(not cancelled)
            mine.cancel()
            await asyncio.wait([mine])

    tree.create_task(parent())
    await settle()
    await tree.cancel_all()
    assert is_ended_in_order == [True]
    assert len(cancelled) == 1
    assert not tree.pending


async def test_task_that_lost_its_cancellation_is_cancelled_again():
    tree, num_lost = TaskTree(), 0

    async def loses_one():
        nonlocal num_lost
        try:
            await run_forever()
        except asyncio.CancelledError:
            num_lost += 1
        await run_forever()

    tree.create_task(loses_one())
    await settle()
    await tree.cancel_all()
    assert num_lost == 1
    assert not tree.pending


async def test_cancel_all_returns_after_its_timeout_and_logs_what_is_left(caplog):
    tree, may_end = TaskTree(), asyncio.Event()

    async def never_ends():
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    task = tree.create_task(never_ends())
    task.set_name("the stubborn one")
    await settle()
    await tree.cancel_all(seconds=0.01)
    assert "the stubborn one" in caplog.text
    may_end.set()
    await task


async def test_cancel_all_leaves_tasks_of_other_trees_alone():
    one, other = TaskTree(), TaskTree()
    one.create_task(run_forever())
    others = [other.create_task(run_forever()), asyncio.create_task(run_forever())]
    await settle()
    await one.cancel_all()
    assert not one.pending
    assert not any(task.done() for task in others)
    for task in others:
        task.cancel()
    await wait_for_all(others)


async def test_run_uncancelled_completes_although_its_caller_is_cancelled():
    may_end, has_ended = asyncio.Event(), []

    async def ending():
        await may_end.wait()
        has_ended.append(True)

    waiter = asyncio.create_task(run_uncancelled(ending()))
    for _ in range(3):
        await settle()
        waiter.cancel()
    await settle()
    assert not waiter.done(), "it keeps waiting"
    may_end.set()
    await asyncio.wait([waiter], timeout=DEADLINE_SECONDS)
    assert has_ended
    assert waiter.cancelled(), "then it is cancelled"


async def test_run_uncancelled_raises_the_error_of_its_work():
    async def fails():
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await run_uncancelled(fails())
