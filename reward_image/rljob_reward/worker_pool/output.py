"""Output of user code, passed on to the server's log within a budget, so that printing never fills a disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_BURST_BYTES = 256 << 10
_BYTES_PER_SECOND = 16 << 10


class OutputLimit:
    """A token bucket over bytes of output. After a drop, the next admitted output reports how much was dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budget = float(_BURST_BYTES)
        self._at = clock()
        self._num_dropped = 0

    def admit(self, data: bytes) -> bytes:
        """Return the bytes to log for `data`."""
        now = self._clock()
        self._budget = min(_BURST_BYTES, self._budget + (now - self._at) * _BYTES_PER_SECOND)
        self._at = now
        if len(data) > self._budget:
            self._num_dropped += len(data)
            return b""
        self._budget -= len(data)
        notice = f"[{self._num_dropped} bytes of the reward's output left out]\n" if self._num_dropped else ""
        self._num_dropped = 0
        return notice.encode() + data


class OutputLog:
    """Writes the admitted part to standard error. If that is full or closed, lines are lost, but no requests."""

    def __init__(self) -> None:
        self._limit = OutputLimit()

    def write(self, data: bytes) -> None:
        try:
            sys.stderr.buffer.write(self._limit.admit(data))
            sys.stderr.buffer.flush()
        except (OSError, ValueError):
            pass
