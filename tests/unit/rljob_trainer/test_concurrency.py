"""Work in a thread ends before a cancellation is raised; tasks that are ended have ended."""

import asyncio
import threading

import pytest

from rljob_trainer.concurrency import end_tasks, run_in_thread


async def test_result_and_error_of_the_thread_are_those_of_the_work():
    assert await run_in_thread(lambda a, *, b: a + b, 1, b=2) == 3
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 // 0)


async def test_a_cancellation_waits_for_what_is_being_written():
    may_end, written = threading.Event(), []
    task = asyncio.create_task(run_in_thread(lambda: (may_end.wait(10), written.append(1))))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert written == [1]


async def test_tasks_have_ended_whatever_they_raise_and_one_that_has_not_begun_is_left_out():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)
            raise ValueError

    tasks = [asyncio.create_task(work()) for _ in range(2)]
    await asyncio.sleep(0)
    await end_tasks(tasks[0], None, tasks[1])
    assert ended == [True, True]
    await end_tasks(tasks[0], None)
