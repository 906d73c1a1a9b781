"""Trees of tasks: none outlives its tree's end, and none is cancelled under a parent that lives."""

import asyncio

import pytest

from rljob_operator.kube.tasks import TaskTree, finish, to_the_end

DEADLINE_SECONDS = 60


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def for_ever():
    await asyncio.Event().wait()


async def test_what_a_failed_parent_has_left_behind_ends_with_the_tree():
    tree = TaskTree()

    async def fails():
        asyncio.create_task(for_ever())  # noqa: RUF006 - that is what is tested
        raise ValueError("a defect")

    async def root():
        return asyncio.create_task(fails())

    with pytest.raises(ValueError, match="a defect"):
        await (await tree.create_task(root()))
    assert len(tree.pending) == 1
    await tree.end()
    assert not tree.pending


async def test_a_child_is_left_to_its_parent_while_that_lives():
    tree, cancelled, is_ended_in_order = TaskTree(), [], []

    async def child():
        try:
            await for_ever()
        except asyncio.CancelledError:
            cancelled.append(asyncio.current_task())
            raise

    async def parent():
        mine = asyncio.create_task(child())
        try:
            await for_ever()
        finally:
            await settle()
            is_ended_in_order.append(not cancelled)
            mine.cancel()
            await asyncio.wait([mine])

    tree.create_task(parent())
    await settle()
    await tree.end()
    assert is_ended_in_order == [True]
    assert len(cancelled) == 1
    assert not tree.pending


async def test_a_task_that_has_lost_its_cancellation_is_cancelled_again():
    tree, num_lost = TaskTree(), 0

    async def loses_one():
        nonlocal num_lost
        try:
            await for_ever()
        except asyncio.CancelledError:
            num_lost += 1
        await for_ever()

    tree.create_task(loses_one())
    await settle()
    await tree.end()
    assert num_lost == 1
    assert not tree.pending


async def test_the_end_of_a_tree_is_not_waited_for_without_limit(caplog):
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
    await tree.end(seconds=0.01)
    assert "the stubborn one" in caplog.text
    may_end.set()
    await task


async def test_the_end_of_one_tree_leaves_others_and_what_has_no_tree_alone():
    one, other = TaskTree(), TaskTree()
    one.create_task(for_ever())
    others = [other.create_task(for_ever()), asyncio.create_task(for_ever())]
    await settle()
    await one.end()
    assert not one.pending
    assert not any(task.done() for task in others)
    for task in others:
        task.cancel()
    await finish(others)


async def test_what_has_to_end_ends_although_its_waiter_is_cancelled():
    may_end, has_ended = asyncio.Event(), []

    async def ending():
        await may_end.wait()
        has_ended.append(True)

    waiter = asyncio.create_task(to_the_end(ending()))
    for _ in range(3):
        await settle()
        waiter.cancel()
    await settle()
    assert not waiter.done(), "it waits on"
    may_end.set()
    await asyncio.wait([waiter], timeout=DEADLINE_SECONDS)
    assert has_ended
    assert waiter.cancelled(), "and tells then that it was cancelled"


async def test_what_fails_at_the_end_is_told():
    async def fails():
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await to_the_end(fails())
