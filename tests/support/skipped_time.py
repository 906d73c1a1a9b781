"""Time that passes at once: what takes minutes in production is tested without them, on a machine however busy."""

from __future__ import annotations

import asyncio


class SkippedTime:
    """The clock of the running event loop, which `skip` puts forward. Timers that are due then end as after a wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._real, self._skipped = self._loop.time, 0.0
        self._loop.time = self.now  # type: ignore[method-assign]

    def now(self) -> float:
        return self._real() + self._skipped

    def skip(self, seconds: float) -> None:
        self._skipped += seconds
