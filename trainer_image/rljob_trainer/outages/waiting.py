"""Runs work again until what it depends on is back; other errors are raised at once. And a time limit that does not
count outages."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar

from rljob_trainer.outages.registry import Dependency

log = logging.getLogger(__name__)

PAUSES = 1.0, 30.0
"""Seconds between attempts: the first, and at most."""
_Result = TypeVar("_Result")


async def wait_out(
    dependency: Dependency, work: Callable[[], Awaitable[_Result]], explain: Callable[[Exception], str]
) -> _Result:
    """Return the result of `work`. `explain`: why an error is an outage; empty if it is none, and then it is raised.
    Raise OutageError after spec.outageSeconds."""
    delays = double(*PAUSES)
    while True:
        try:
            result = await work()
        except Exception as error:
            if not (why := explain(error)):
                raise
            log.warning("%s is away, and is tried again in %.0f s: %s", dependency.what, delay := next(delays), why)
            dependency.failed(why)
            dependency.check()
            await asyncio.sleep(delay)

        else:
            dependency.succeeded()
            return result


def pause(first: float, most: float, number: int) -> float:
    """Return the seconds between two attempts: each pause is twice the one before, up to `most`. `number`: from 0."""
    return min(most, first * 2.0 ** min(number, 64))


def double(first: float, most: float) -> Iterator[float]:
    """Yield the pauses between attempts."""
    return (pause(first, most, number) for number in count())


@asynccontextmanager
async def deadline(seconds: float, away: Callable[[], float]) -> AsyncIterator[asyncio.Timeout]:
    """Like asyncio.timeout. `away`: returns the seconds of outages so far, which prolong it."""
    loop, before = asyncio.get_running_loop(), away()
    ends_at = loop.time() + seconds
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as scope:
        timer = loop.call_at(ends_at, lambda: expire())

        def expire() -> None:
            nonlocal timer
            moved = ends_at + away() - before
            if moved > loop.time():
                timer = loop.call_at(moved, expire)
            else:
                scope.reschedule(loop.time())

        try:
            yield scope
        finally:
            timer.cancel()
