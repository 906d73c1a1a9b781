"""How long a piece of work of a kind may take, by how long its kind took before.

The limit is max(25 x the median, 2 x the longest), between minSeconds and maxSeconds of spec.hangDetection. So a step,
a compilation or a save of 20 times the median is no hang, and what takes more than maxSeconds always is.
"""

import statistics
from collections import defaultdict, deque

from rljob_api.manifest.job_sections import HangDetection

_OF_MEDIAN = 25
_OF_LONGEST = 2
_NUM_REMEMBERED = 64


class Pace:
    def __init__(self, bounds: HangDetection) -> None:
        self._max = float(bounds.max_seconds)
        self.floor = min(float(bounds.min_seconds), self._max)
        """The lowest limit of any work, in seconds."""
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_REMEMBERED))
        self._longest: dict[str, float] = defaultdict(float)
        """Never forgotten: a compilation is rare, and comes again."""

    def record(self, kind: str, seconds: float) -> None:
        """A piece of work has ended."""
        self._durations[kind].append(seconds)
        self._longest[kind] = max(self._longest[kind], seconds)

    def limit(self, kind: str) -> float:
        """Return the seconds that a piece of work may take: maxSeconds if none of its kind has ended yet."""
        durations = self._durations.get(kind)
        if not durations:
            return self._max
        allowed = max(_OF_MEDIAN * statistics.median(durations), _OF_LONGEST * self._longest[kind])
        return min(self._max, max(self.floor, allowed))
