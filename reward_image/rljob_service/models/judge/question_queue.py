"""Questions of all groups, started in order of arrival as limits and slots allow.

Waits for a free slot and for the rate limiter (a timer, because it sends no events); unblocked by a finished question
or by that timer. Invariants: waiting does not count towards timeouts, and a question is admitted alone, regardless of
the size of its group.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rljob_service.models.execution import ExecutionProgress
from rljob_service.models.rate_limiter import RateLimiter

_MAX_POLL_SECONDS = 1.0


class QuestionQueue:
    def __init__(
        self, limiter: RateLimiter, size: int, timeout_seconds: float, on_wait: Callable[[str, float], None]
    ) -> None:
        self._limiter = limiter
        self._timeout_seconds = timeout_seconds
        self._on_wait = on_wait
        self._slots = asyncio.Semaphore(size)
        self._head = asyncio.Lock()
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[ExecutionProgress]:
        """Wait until a question may be sent. Its timeout starts then."""
        async with self._slots:
            async with self._head:
                await self._wait_for_limiter()
                charged = self._limiter.admit()
            progress = ExecutionProgress(time.monotonic() + self._timeout_seconds, charged)
            try:
                yield progress
            finally:
                self._limiter.release(charged, progress.used)
                self._ended.set()

    async def _wait_for_limiter(self) -> None:
        since, first_limit = time.monotonic(), ""
        while True:
            self._ended.clear()
            seconds, limit = self._limiter.required_wait()
            if not seconds:
                break
            first_limit = first_limit or limit
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, _MAX_POLL_SECONDS)):
                    await self._ended.wait()
        if first_limit:
            self._on_wait(first_limit, time.monotonic() - since)
