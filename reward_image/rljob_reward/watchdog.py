"""Time-outs of executions. All are equally long, so they fall due in the order of their starts: one timer will do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rljob_reward.process import WorkerProcess


class Watchdog:
    """Calls `on_late` once for each worker that was added `seconds` ago and not removed since."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, on_late: Callable[[WorkerProcess], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._on_late = on_late
        self._deadlines: dict[WorkerProcess, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, worker: WorkerProcess) -> None:
        self._deadlines[worker] = deadline = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check)

    def remove(self, worker: WorkerProcess) -> None:
        self._deadlines.pop(worker, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Report the late ones and sleep until the next can be late; it may be gone by then, which costs nothing."""
        now = self._loop.time()
        late = []
        for worker, deadline in self._deadlines.items():
            if deadline > now:
                break
            late.append(worker)
        for worker in late:
            del self._deadlines[worker]
        earliest = next(iter(self._deadlines.values()), None)
        self._timer = None if earliest is None else self._loop.call_at(earliest, self._check)
        for worker in late:
            self._on_late(worker)
