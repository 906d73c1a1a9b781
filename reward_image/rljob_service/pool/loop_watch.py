"""Whether the event loop of a shared process turns. Facts come in through the board and the caller's clock. Pure.

A coroutine that does not await blocks all others of its process. Invariant: a loop without requests, which does not
beat, is never blocked.
"""

from typing import Final

BLOCKED_SECONDS: Final = 10.0
"""Without a turn of its loop a process is killed. Longer than an import inside a function usually takes, and than a
process may have to wait for a processor."""
_LATE_SECONDS: Final = 2.0
"""Without a turn, what takes too long may do so because of the request that runs."""


class LoopWatch:
    def __init__(self) -> None:
        self._beats = -1
        self._since: float | None = None
        """When the loop was last seen to turn; None without requests."""

    def start(self, now: float) -> None:
        """The first request begins."""
        self._since = now

    def stop(self) -> None:
        """The last request has ended."""
        self._since = None

    def observe(self, beats: int, now: float) -> float:
        """Return the seconds for which the loop has not turned."""
        if self._since is None:
            return 0.0
        if beats != self._beats:
            self._beats, self._since = beats, now
        return now - self._since

    def is_late(self, beats: int, now: float) -> bool:
        return self.observe(beats, now) > _LATE_SECONDS
