"""Work under a watcher."""

import asyncio

import pytest

from rljob_trainer.concurrency import run_with_watcher


class WatcherError(Exception):
    """What the watcher noticed."""


async def watch(event):
    await event.wait()
    raise WatcherError


async def test_work_that_ends_cancels_the_watcher():
    watching = watch(asyncio.Event())
    await run_with_watcher(asyncio.sleep(0), watching)
    assert watching.cr_frame is None


async def test_watcher_error_cancels_the_work():
    event, is_cancelled = asyncio.Event(), []

    async def work():
        event.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.append(True)
            raise

    with pytest.raises(WatcherError):
        await run_with_watcher(work(), watch(event))
    assert is_cancelled


@pytest.mark.parametrize(("does_fail", "expected"), [(True, WatcherError), (False, None)])
async def test_watcher_error_wins_only_over_failed_work(does_fail, expected):
    async def work():
        if does_fail:
            raise ValueError

    async def fail():
        raise WatcherError

    if expected is None:
        await run_with_watcher(work(), fail())
    else:
        with pytest.raises(expected):
            await run_with_watcher(work(), fail())


async def test_result_is_that_of_the_work_also_after_the_watcher_has_returned():
    async def work():
        for _ in range(3):
            await asyncio.sleep(0)
        return 7

    assert await run_with_watcher(work(), asyncio.sleep(0)) == 7
