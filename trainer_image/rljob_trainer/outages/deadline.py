"""A time limit that does not count outages."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


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
