"""How long work may take by its own history, and which work that runs now takes longer: it hangs.

Each part that is watched (a rank, an engine, an event loop) says or shows how much it has finished, and what it does
now: its `Beat`. The judge hears the beats in another process, or at least in another thread.
The limit is max(25 x the median, 2 x the longest), between minSeconds and maxSeconds of spec.hangDetection. So a step,
a compilation or a save of 20 times the median is no hang, and what takes more than maxSeconds always is. The clock is
that of the judge, which ticks: time counts only while the judge looks, and not in a pause. So a judge that was stopped,
or whose whole machine slept, finds nothing to blame for that time.
"""

import contextlib
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rljob_api.manifest.job_sections import HangDetection
from rljob_api.wire.driver_status import HungPart

_OF_MEDIAN = 25
_OF_LONGEST = 2
_NUM_REMEMBERED = 64


class Pace:
    def __init__(self, bounds: HangDetection) -> None:
        self.bounds = bounds
        """May change at any time."""
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_REMEMBERED))
        self._longest: dict[str, float] = defaultdict(float)
        """Never forgotten: a compilation is rare, and comes again."""

    @property
    def floor(self) -> float:
        """The lowest limit of any work, in seconds."""
        return min(self.bounds.min_seconds, self.bounds.max_seconds)

    def record(self, kind: str, seconds: float) -> None:
        """A piece of work has ended."""
        self._durations[kind].append(seconds)
        self._longest[kind] = max(self._longest[kind], seconds)

    def limit(self, kind: str) -> float:
        """Return the seconds that a piece of work may take: maxSeconds if none of its kind has ended yet."""
        durations, longest = self._durations.get(kind), self.bounds.max_seconds
        if not durations:
            return longest
        allowed = max(_OF_MEDIAN * statistics.median(durations), _OF_LONGEST * self._longest[kind])
        return min(longest, max(self.floor, allowed))


MAX_TICK_SECONDS = 5.0
"""The most that one tick adds. A judge ticks about once a second; a longer gap is the judge's own."""


class Beat(NamedTuple):
    """How far a part is."""

    num_done: int
    """What it has finished so far: collectives that it has entered, answers, outputs, turns of its loop, steps."""
    doing: str = ""
    """The kind of work that it finishes next; empty: it owes nothing."""
    num_waiting: int = 0
    """Engines that wait for weights on the device of a rank."""


@dataclass(frozen=True)
class Hang:
    """A piece of work that takes longer than its limit."""

    kind: str
    seconds: float
    limit_seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s, and {self.limit_seconds:.0f} s are allowed (spec.hangDetection)"

    def blame(self, role: str, name: str, doing: str, action: str) -> HungPart:
        """Return what the status shows. `role`, `name`: what hangs. `action`: what follows."""
        return HungPart(
            role=role, name=name, seconds=self.seconds, limit_seconds=self.limit_seconds, doing=doing, action=action
        )


@dataclass
class Judge:
    """The judge of parts that work at once. The caller ticks, and asks `find_hang` after it."""

    pace: Pace
    ticked_at: float
    """When its clock last ticked, or was made: of a monotonic clock."""
    now: float = 0.0
    """Seconds in which the judge looked, without pauses."""
    _beats: dict[str, tuple[Beat, float]] = field(default_factory=dict)
    """By part: its last beat, and when it began with what that says."""

    def tick(self, now: float, *, is_paused: bool = False) -> None:
        """`now`: of a monotonic clock. `is_paused`: the time since the last tick does not count."""
        gap, self.ticked_at = now - self.ticked_at, now
        if not is_paused:
            self.now += min(max(gap, 0.0), MAX_TICK_SECONDS)

    def hear(self, part: str, beat: Beat) -> None:
        """A beat of a part. What it has finished since the last one counts, unless it did nothing then; what it does no
        more, and has not finished, teaches nothing."""
        before, since = self._beats.get(part, (Beat(beat.num_done), self.now))
        has_finished = beat.num_done > before.num_done
        if has_finished and before.doing:
            self.pace.record(before.doing, self.now - since)
        if has_finished or not (before.doing and beat.doing):
            since = self.now
        self._beats[part] = beat, since

    @contextlib.contextmanager
    def running(self, kind: str) -> Iterator[None]:
        """Within, the one piece of work of this kind runs. If it fails, its duration says nothing."""
        self.hear(kind, Beat(0, kind))
        num_done = 0
        try:
            yield
            num_done = 1
        finally:
            self.hear(kind, Beat(num_done))

    def seconds(self, part: str) -> float | None:
        """Return for how long a part does what it does; None: nothing."""
        beat, since = self._beats.get(part, (Beat(0), 0.0))
        return self.now - since if beat.doing else None

    def find_hang(self, share: float = 1.0) -> Hang | None:
        """Return the piece of work that is over its limit by the most; None if none is. `share`: of the limit."""
        hangs = [
            Hang(beat.doing, self.now - since, self.pace.limit(beat.doing))
            for beat, since in self._beats.values()
            if beat.doing
        ]
        over = [hang for hang in hangs if hang.seconds > share * hang.limit_seconds]
        return max(over, key=lambda hang: hang.seconds - share * hang.limit_seconds, default=None)
