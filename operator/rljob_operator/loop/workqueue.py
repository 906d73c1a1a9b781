"""Which job is looked at next. KeyedQueue is the pure part; `run` ties watch, queue and reconcile together.

`run` consumes the keys that the backend's watch yields, produces reconciles, and waits for the next key or the next
due time. Invariants: a key is never worked on twice at once; a key that is added while it is worked on is worked on
again afterwards; a key that fails waits longer each time, and holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import datetime
from typing import Any, NamedTuple

from rljob_api.errors import TransientError
from rljob_operator.backend import Backend, JobKey, utc_now
from rljob_operator.loop.reconcile import reconcile

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 300.0
_WATCH_BACKOFF_SECONDS = 1.0


class RewardModelKey(NamedTuple):
    """Names one RewardModel. Its third part keeps it apart from a JobKey of the same name."""

    namespace: str
    name: str
    kind: str = "RewardModel"


Key = JobKey | RewardModelKey
ReconcileKey = Callable[[Any, Any, datetime], Awaitable[float | None]]


class KeyedQueue:
    """A de-duplicating queue of keys. Times are seconds of one clock that the caller passes in.

    The first change of a key is acted on at once, those in the `seconds_between_looks` after it together."""

    def __init__(self, seconds_between_looks: float = 0.0) -> None:
        self._seconds_between_looks = seconds_between_looks
        self._ready: deque[Key] = deque()
        self._dirty: set[Key] = set()
        self._working: set[Key] = set()
        self._later: list[tuple[float, Key]] = []
        self._due: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._since: dict[Key, float] = {}
        self._taken: dict[Key, float] = {}
        """When keys were taken, oldest first; only what was a moment ago."""

    def add(self, key: Key) -> None:
        """Work on `key` as soon as may be."""
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._working:
            self._ready.append(key)

    def add_at(self, key: Key, when: float) -> None:
        """Work on `key` at `when`, or at an earlier time that it has already."""
        if when < self._due.get(key, float("inf")):
            self._due[key] = when
            heapq.heappush(self._later, (when, key))

    def add_changed(self, key: Key, now: float) -> None:
        """Work on `key`, of which something has changed: at once, but not right after it was last worked on."""
        earliest = self._taken.get(key, float("-inf")) + self._seconds_between_looks
        if now >= earliest:
            self.add(key)
        elif key not in self._dirty:
            self.add_at(key, earliest)

    def take(self, now: float) -> Key | None:
        """The next key to work on; None when none is due. The caller must call `finish` or `fail` with it."""
        self._move_due(now)
        if not self._ready:
            return None
        key = self._ready.popleft()
        self._since.pop(key, None)
        self._dirty.discard(key)
        self._working.add(key)
        self._taken.pop(key, None)
        self._taken[key] = now
        while now - self._taken[first := next(iter(self._taken))] > self._seconds_between_looks:
            del self._taken[first]
        self._due.pop(key, None)  # this look is the one that was asked for
        return key

    def finish(self, key: Key) -> None:
        """`key` was worked on with success."""
        self._failures.pop(key, None)
        self._release(key)

    def fail(self, key: Key, now: float) -> float:
        """`key` was worked on and failed. Returns the seconds until it is tried again by itself."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = backoff_seconds(failures)
        self._release(key)
        self.add_at(key, now + delay)
        return delay

    def next_due(self) -> float | None:
        """When `take` will have something that it has not now; None: not by the passing of time."""
        self._drop_stale()
        return self._later[0][0] if self._later else None

    @property
    def depth(self) -> int:
        """Keys that are ready and wait for a worker."""
        return len(self._ready)

    def oldest_age(self, now: float) -> float:
        """For how long the first ready key has been seen to wait. Ages begin when somebody first looks."""
        for key in self._ready:
            self._since.setdefault(key, now)
        return now - self._since[self._ready[0]] if self._ready else 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is ready or worked on."""
        return not self._ready and not self._working

    def _release(self, key: Key) -> None:
        self._working.discard(key)
        if key in self._dirty:
            self._ready.append(key)

    def _move_due(self, now: float) -> None:
        self._drop_stale()
        while self._later and self._later[0][0] <= now:
            _, key = heapq.heappop(self._later)
            self._due.pop(key, None)
            self.add(key)
            self._drop_stale()

    def _drop_stale(self) -> None:
        while self._later and self._due.get(self._later[0][1]) != self._later[0][0]:
            heapq.heappop(self._later)


def describe(key: Key) -> str:
    return f"{'RewardModel' if isinstance(key, RewardModelKey) else 'RLJob'} {key.namespace}/{key.name}"


def backoff_seconds(failures: int) -> float:
    """Doubles with each failure in a row."""
    return min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 30))


async def run(
    backend: Backend,
    workers: int = 8,
    *,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = utc_now,
    queue: KeyedQueue | None = None,
    reconcile_key: ReconcileKey | None = None,
) -> None:
    """Reconcile until cancelled, or until the backend's watch ends and what it had named is done."""
    queue, changed = queue or KeyedQueue(), asyncio.Condition()

    async def work() -> None:
        while True:
            key = await _take(queue, changed, clock)
            await _work_on(backend, queue, key, clock, now, reconcile_key or reconcile)
            async with changed:
                changed.notify_all()

    tasks = [asyncio.create_task(work(), name=f"reconcile-{index}") for index in range(workers)]
    try:
        await _feed(backend, queue, changed, clock)
        async with changed:
            await changed.wait_for(lambda: queue.is_idle)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(backend: Backend, queue: KeyedQueue, changed: asyncio.Condition, clock: Callable[[], float]) -> None:
    """Put what the watch yields into the queue. A watch that breaks is begun again: it names every job then."""
    while True:
        watch = backend.watch()
        try:
            async for key in watch:
                async with changed:
                    queue.add_changed(key, clock())
                    changed.notify()
            return
        except TransientError as error:
            log.warning("the watch broke and begins again: %s", error)
            await asyncio.sleep(_WATCH_BACKOFF_SECONDS)
        finally:
            if isinstance(watch, AsyncGenerator):  # else it ends when it is found to be garbage, after all else
                await watch.aclose()


async def _take(queue: KeyedQueue, changed: asyncio.Condition, clock: Callable[[], float]) -> Key:
    """The next key; waits until there is one."""
    async with changed:
        while True:
            key = queue.take(clock())
            if key is not None:
                return key
            due = queue.next_due()
            timeout = None if due is None else max(0.0, due - clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):  # wait_for of Python 3.11 may lose a cancellation
                    await changed.wait()


async def _work_on(
    backend: Backend,
    queue: KeyedQueue,
    key: Key,
    clock: Callable[[], float],
    now: Callable[[], datetime],
    reconcile_key: ReconcileKey,
) -> None:
    try:
        again = await reconcile_key(backend, key, now())
    except TransientError as error:
        delay = queue.fail(key, clock())
        log.warning("%s: %s; next try in %.1f s", describe(key), error, delay)
    except Exception:
        # A defect of ours must not stop the other jobs. It is loud, and the key is tried again ever more seldom.
        delay = queue.fail(key, clock())
        log.exception("%s: reconcile failed; next try in %.1f s", describe(key), delay)
    else:
        queue.finish(key)
        if again is not None:
            queue.add_at(key, clock() + again)
