"""Output of user code, passed on to the server's log within a budget, so that printing never fills a disk."""

import contextlib
import sys
import time

_BURST_BYTES = 256 << 10
_BYTES_PER_SECOND = 16 << 10


class OutputLog:
    """A token bucket over bytes of output. After a drop, the next admitted output reports how much was dropped."""

    def __init__(self) -> None:
        self._budget = float(_BURST_BYTES)
        self._at = time.monotonic()
        self._num_dropped = 0

    def write(self, data: bytes) -> None:
        """Write what the budget admits. If standard error is full or closed, lines are lost, but no requests."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(self._admit(data))
            sys.stderr.buffer.flush()

    def _admit(self, data: bytes) -> bytes:
        now = time.monotonic()
        self._budget = min(_BURST_BYTES, self._budget + (now - self._at) * _BYTES_PER_SECOND)
        self._at = now
        if len(data) > self._budget:
            self._num_dropped += len(data)
            return b""
        self._budget -= len(data)
        notice = f"[{self._num_dropped} bytes of the reward's output left out]\n" if self._num_dropped else ""
        self._num_dropped = 0
        return notice.encode() + data
