"""Work in a thread ends before a cancellation is raised."""

import asyncio
import threading

import pytest

from rljob_trainer.concurrency import run_in_thread


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
