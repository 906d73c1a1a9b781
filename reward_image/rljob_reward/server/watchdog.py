"""Time-outs of executions. All are equally long, so they fall due in the order of their starts: one timer will do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rljob_reward.slots import Slot


class Watchdog:
    """Calls `on_late` once for each slot that was added `seconds` ago and not removed since."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, on_late: Callable[[Slot], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._on_late = on_late
        self._deadlines: dict[Slot, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, slot: Slot) -> None:
        self._deadlines[slot] = deadline = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check)

    def remove(self, slot: Slot) -> None:
        self._deadlines.pop(slot, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Report the late ones and sleep until the next can be late; it may be gone by then, which costs nothing."""
        now = self._loop.time()
        late = []
        for slot, deadline in self._deadlines.items():
            if deadline > now:
                break
            late.append(slot)
        for slot in late:
            del self._deadlines[slot]
        earliest = next(iter(self._deadlines.values()), None)
        self._timer = None if earliest is None else self._loop.call_at(earliest, self._check)
        for slot in late:
            self._on_late(slot)
