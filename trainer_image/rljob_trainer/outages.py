"""Outages of what a job depends on, and how it waits for their end.

What a job depends on, which of it is away, since when, and when the job gives up. Pure: the clock is injected.

Facts come in per dependency through `succeeded`, `failed` and `clear`. A success ends an outage. What waits calls
`check`, which raises after spec.outageSeconds; nothing else ends a job because of an outage. `name_storage` names the
storage of models and data. Invariant: the time of outages that overlap counts once.

`wait_out` runs work again until what it depends on is back; other errors are raised at once. `deadline` is a time limit
that does not count outages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import TypeVar

from yarl import URL

from rljob_api.errors import UserError
from rljob_api.wire.driver_status import Outage
from rljob_api.wire.text import clean_line
from rljob_inputs.hub import HubAccess
from rljob_inputs.objects.access import is_object

DEFAULT_LIMIT_SECONDS = 21_600.0
_OPENS_AFTER_SECONDS = 10.0
"""Shorter failures are what retries are for, and no outage: a replaced Pod, a lost connection."""
FIRST_ANSWER_SECONDS = 1_800.0
"""For an endpoint outside of the job: a server that was started with the job has loaded its model by then. Its address
may be wrong, and nothing but the user can tell."""
_MAX_MESSAGE_LENGTH = 300


class OutageError(UserError):
    """Something that the job depends on was away for longer than spec.outageSeconds."""


@dataclass
class Dependency:
    """An endpoint, the replicas of a service, the Hub, or the volume of the run's folder."""

    outages: Outages
    what: str
    remedy: str
    first_answer_seconds: float
    has_answered: bool = False
    """Now, or before the checkpoint from which the run resumed."""
    failing_since: float | None = None
    """Start of the period in which attempts were made and none succeeded."""
    last_error: str = ""
    _ended_seconds: float = 0.0
    _outage_ended_at: float = -math.inf

    def succeeded(self) -> None:
        self.has_answered = True
        self._end()

    def failed(self, error: str) -> None:
        """No attempt has succeeded since the last one that did."""
        self.last_error = clean_line(error, _MAX_MESSAGE_LENGTH)
        if self.failing_since is None:
            self.failing_since = self.outages.now()

    def clear(self) -> None:
        """It is not known to be away: nothing is tried, an attempt may well succeed, or it answered that it is busy."""
        self._end()

    @property
    def failing_seconds(self) -> float:
        """Since the first failure after the last success; 0 without one."""
        return 0.0 if self.failing_since is None else self.outages.now() - self.failing_since

    @property
    def away_seconds(self) -> float:
        """Time so far in which nothing succeeded, which deadlines of requests leave out."""
        return self._ended_seconds + self.failing_seconds

    @property
    def is_open(self) -> bool:
        """Whether this is an outage: something that answered before, and no longer does."""
        return self.has_answered and self.failing_since is not None and self.outages.is_long(self.failing_seconds)

    def was_away(self, since: float) -> bool:
        """Whether it fails now, or an outage ended after `since`: what depends on it and failed may not be to blame."""
        return self.failing_since is not None or self._outage_ended_at > since

    def check(self) -> None:
        """Raise OutageError if it is away for longer than the job waits."""
        if self.failing_since is None:
            return
        if not self.has_answered and self.failing_seconds >= self.first_answer_seconds:
            raise OutageError(
                f"{self.what}: has not answered once in {self.failing_seconds:.0f} s; last error: {self.last_error}; "
                f"{self.remedy}"
            )
        if self.failing_seconds < self.outages.limit_seconds:
            return
        since = datetime.fromtimestamp(self.outages.wall() - self.failing_seconds, UTC)
        raise OutageError(
            f"{self.what}: away since {since:%Y-%m-%dT%H:%M:%SZ}, for longer than spec.outageSeconds "
            f"({self.outages.limit_seconds:g} s); last error: {self.last_error}; {self.remedy}, or raise "
            "spec.outageSeconds; the job resumes from its last checkpoint"
        )

    def report(self) -> Outage:
        return Outage(
            what=self.what,
            seconds=self.failing_seconds,
            limit_seconds=self.outages.limit_seconds,
            message=self.last_error,
        )

    def _end(self) -> None:
        if self.failing_since is not None:
            if self.is_open:
                self.outages.record_ended(self.failing_since)
                self._outage_ended_at = self.outages.now()
            self._ended_seconds += self.failing_seconds
            self.failing_since = None


@dataclass(eq=False)
class Outages:
    """All dependencies of a job.

    `limit_seconds`: spec.outageSeconds, which may change. `wall`: in seconds since the epoch, for messages.
    """

    limit_seconds: float = DEFAULT_LIMIT_SECONDS
    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._dependencies: list[Dependency] = []
        self._ended: list[tuple[float, float]] = []
        """Start and end of the outages that have ended: disjoint, in order."""
        self._answered: set[str] = set()
        """What answered before this process started."""

    def watch(self, what: str, remedy: str = "find out why", *, first_answer_seconds: float = math.inf) -> Dependency:
        """Add a dependency. `what`: the field's path and the address, with which the message begins. `remedy`: what a
        user does about it. `first_answer_seconds`: for which the job waits for its first answer."""
        found = Dependency(self, what, remedy, first_answer_seconds)
        found.has_answered = what in self._answered
        self._dependencies.append(found)
        return found

    def recall(self, answered: Iterable[str]) -> None:
        """Take over what answered before the driver restarted."""
        self._answered |= set(answered)
        for each in self._dependencies:
            each.has_answered |= each.what in self._answered

    def answered(self) -> list[str]:
        """Return what has answered, for the next driver."""
        return sorted({each.what for each in self._dependencies if each.has_answered})

    def is_long(self, seconds: float) -> bool:
        """Whether a failure is no longer one that a retry usually ends."""
        return seconds >= min(_OPENS_AFTER_SECONDS, self.limit_seconds / 2)

    def is_open(self) -> bool:
        """Whether anything is away now."""
        return any(each.is_open for each in self._dependencies)

    def seconds(self) -> float:
        """Return the time so far in which anything was away; it grows during an outage."""
        found = list(self._ended)
        since = [each.failing_since for each in self._dependencies if each.is_open and each.failing_since is not None]
        if since:
            _add_last(found, min(since), self.now())
        return sum(end - start for start, end in found)

    def report(self) -> list[Outage]:
        """Return those that are away now, the longest first."""
        return sorted((each.report() for each in self._dependencies if each.is_open), key=lambda each: -each.seconds)

    def describe(self) -> str:
        """Return what the job waits for; empty without an outage."""
        waits = [f"{each.what}, away for {each.seconds:.0f} s: {each.message}" for each in self.report()]
        return f"waits for {'; '.join(waits)}" if waits else ""

    def record_ended(self, start: float) -> None:
        """Count an outage that ends now."""
        _add_last(self._ended, start, self.now())


def hide_secrets(url: str) -> str:
    """Return a URL without its password and its query, which may have a key."""
    return str(URL(url).with_user(None).with_query(None).with_fragment(None))


def _add_last(intervals: list[tuple[float, float]], start: float, end: float) -> None:
    """Add an interval that ends after all others, and merge those that it overlaps."""
    while intervals and intervals[-1][1] >= start:
        start = min(start, intervals.pop()[0])
    intervals.append((start, end))


def name_storage(sources: Iterable[str], access: HubAccess) -> tuple[str, str]:
    """Return the field with the address, and what a user does about it: of the object storage, if no source is on the
    Hub."""
    kinds = {is_object(source) for source in sources if source.startswith("hf://") or is_object(source)}
    if kinds == {True}:
        address = hide_secrets(access.objects.place)
        return f"spec.objectStorage ({address})", "check the network, or set spec.objectStorage.endpoint"
    return f"spec.hub ({hide_secrets(access.url)})", "check the network, or set spec.hub.endpoint"


log = logging.getLogger(__name__)

PAUSES = 1.0, 30.0
"""Seconds between attempts: the first, and at most."""
_Result = TypeVar("_Result")


async def wait_out(
    dependency: Dependency, work: Callable[[], Awaitable[_Result]], explain: Callable[[Exception], str]
) -> _Result:
    """Return the result of `work`. `explain`: why an error is an outage; empty if it is none, and then it is raised.
    Raise OutageError after spec.outageSeconds."""
    delays = double(*PAUSES)
    while True:
        try:
            result = await work()
        except Exception as error:
            if not (why := explain(error)):
                raise
            log.warning("%s is away, and is tried again in %.0f s: %s", dependency.what, delay := next(delays), why)
            dependency.failed(why)
            dependency.check()
            await asyncio.sleep(delay)

        else:
            dependency.succeeded()
            return result


def pause(first: float, most: float, number: int) -> float:
    """Return the seconds between two attempts: each pause is twice the one before, up to `most`. `number`: from 0."""
    return min(most, first * 2.0 ** min(number, 64))


def double(first: float, most: float) -> Iterator[float]:
    """Yield the pauses between attempts."""
    return (pause(first, most, number) for number in count())


@asynccontextmanager
async def deadline(seconds: float, away: Callable[[], float]) -> AsyncIterator[asyncio.Timeout]:
    """Like asyncio.timeout. `away`: returns the seconds of outages so far, which prolong it."""
    loop, before = asyncio.get_running_loop(), away()
    ends_at = loop.time() + seconds
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as scope:
        timer = loop.call_at(ends_at, lambda: expire())

        def expire() -> None:
            nonlocal timer
            moved = ends_at + away() - before
            if moved > loop.time():
                timer = loop.call_at(moved, expire)
            else:
                scope.reschedule(loop.time())

        try:
            yield scope
        finally:
            timer.cancel()
