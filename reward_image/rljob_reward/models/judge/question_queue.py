"""The questions about all groups under way, one after another as they came, as limits and slots allow.

Owns the order and when one may be asked; leaves the limits to their gate. Waits for a free place and for the gate (a
timer, since nothing else tells); unblocked by a question that ended or by that timer. Invariant: who waits here is not
being timed, and needs leave for one question alone, however many its group has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rljob_reward.models.model_slots import Gate, Progress

_LONGEST_NAP_SECONDS = 1.0


class Turns:
    """At most `size` questions are asked at once."""

    def __init__(self, gate: Gate, size: int, timeout_seconds: float, on_wait: Callable[[str, float], None]) -> None:
        self._gate = gate
        self._timeout_seconds = timeout_seconds
        self._on_wait = on_wait
        self._places = asyncio.Semaphore(size)
        self._head = asyncio.Lock()
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Progress]:
        """A question's turn: its time begins when it has come."""
        async with self._places:
            async with self._head:
                await self._wait_for_gate()
                charged = self._gate.enter()
            progress = Progress(time.monotonic() + self._timeout_seconds, charged)
            try:
                yield progress
            finally:
                self._gate.leave(charged, progress.used)
                self._ended.set()

    async def _wait_for_gate(self) -> None:
        since, waited_for = time.monotonic(), ""
        while True:
            self._ended.clear()
            seconds, limit = self._gate.closed()
            if not seconds:
                break
            waited_for = waited_for or limit
            try:
                async with asyncio.timeout(min(seconds, _LONGEST_NAP_SECONDS)):
                    await self._ended.wait()
            except TimeoutError:
                pass
        if waited_for:
            self._on_wait(waited_for, time.monotonic() - since)
