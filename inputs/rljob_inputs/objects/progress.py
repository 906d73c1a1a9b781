"""How far a transfer is: a line every few seconds, with a share of the bytes. An injected clock; no I/O."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Count = Callable[[int], None]
"""Gets the bytes that were transferred since its last call. What it raises ends the transfer."""
_PERIOD_SECONDS = 5.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(eq=False)
class Progress:
    """Counts bytes from several threads.

    `what`: the transfer, such as `downloads s3://bucket/model`. `total`: its bytes.
    """

    _what: str
    _total: int
    _report: Callable[[str], None]
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._done, self._reported_at = 0, self._clock()
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived, and report at most every 5 s."""
        with self._lock:
            self._done += num_bytes
            if (now := self._clock()) - self._reported_at < _PERIOD_SECONDS:
                return
            self._reported_at = now
        self._report(self.describe())

    def describe(self) -> str:
        share = 100 if not self._total else min(100, 100 * self._done // self._total)
        return f"{self._what}: {share} % of {describe_bytes(self._total)}"


def describe_bytes(num_bytes: int) -> str:
    """Return a number of bytes with a unit: 3.2 GiB."""
    value, unit = float(num_bytes), _UNITS[0]
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def count_bytes(count: Count) -> Any:
    """Return fsspec's callback, which gets the bytes so far."""
    from fsspec.callbacks import Callback

    before = 0

    def call(size: int | None, value: int, **_: Any) -> None:
        nonlocal before
        count(value - before)
        before = value

    return Callback(hooks={"bytes": call})
