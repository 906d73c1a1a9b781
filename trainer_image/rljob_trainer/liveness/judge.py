"""How long work may take by its own history, and which work that runs now takes longer: it hangs.

The limit is max(25 x the median, 2 x the longest), between minSeconds and maxSeconds of spec.hangDetection. So a step,
a compilation or a save of 20 times the median is no hang, and what takes more than maxSeconds always is. The clock is
that of the watcher, which ticks: time counts only while the watcher looks, and not in a pause. So a watcher that was
stopped, or whose whole machine slept, finds nothing to blame for that time.
"""

import contextlib
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

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


MAX_TICK_SECONDS = 5.0
"""The most that one tick adds. A watcher ticks about once a second; a longer gap is the watcher's own."""


class Beat(NamedTuple):
    """How far a rank is."""

    num_collectives: int
    """Entered so far. All ranks enter the same ones, so who has entered fewer is behind."""
    micro_batch: tuple[int, int] | None
    """The one it works on, or worked on last, and how many its call has; None before the first."""
    num_waiting: int = 0
    """Engines on its device that wait for weights."""


@dataclass(eq=False)
class Piece:
    """A piece of work that runs."""

    kind: str
    begun_at: float
    """In seconds of the watcher's clock."""


@dataclass(frozen=True)
class Hang:
    """A piece of work that takes longer than its limit."""

    kind: str
    seconds: float
    limit_seconds: float


@dataclass
class Work:
    """Pieces of work of any kinds at once. The caller ticks, and asks `find_hang` after it."""

    pace: Pace
    ticked_at: float
    """When its clock last ticked, or was made: of a monotonic clock."""
    now: float = 0.0
    """Seconds in which the watcher looked, without pauses."""
    _running: list[Piece] = field(default_factory=list)

    def tick(self, now: float, *, is_paused: bool = False) -> None:
        """`now`: of a monotonic clock. `is_paused`: the time since the last tick does not count."""
        gap, self.ticked_at = now - self.ticked_at, now
        if not is_paused:
            self.now += min(max(gap, 0.0), MAX_TICK_SECONDS)

    def begin(self, kind: str) -> Piece:
        piece = Piece(kind, self.now)
        self._running.append(piece)
        return piece

    def finish(self, piece: Piece) -> None:
        """It has ended, so its duration counts."""
        self.drop(piece)
        self.pace.record(piece.kind, self.seconds(piece))

    def drop(self, piece: Piece) -> None:
        """It failed or was given up: its duration says nothing. Idempotent."""
        if piece in self._running:
            self._running.remove(piece)

    @contextlib.contextmanager
    def running(self, kind: str) -> Iterator[Piece]:
        """Within, a piece of work runs."""
        piece = self.begin(kind)
        try:
            yield piece
        except BaseException:
            self.drop(piece)
            raise
        self.finish(piece)

    def seconds(self, piece: Piece) -> float:
        return self.now - piece.begun_at

    def find_hang(self, share: float = 1.0) -> Hang | None:
        """Return the piece of work that is over its limit by the most; None if none is. `share`: of the limit."""
        hangs = [Hang(each.kind, self.seconds(each), self.pace.limit(each.kind)) for each in self._running]
        over = [hang for hang in hangs if hang.seconds > share * hang.limit_seconds]
        return max(over, key=lambda hang: hang.seconds - share * hang.limit_seconds, default=None)
