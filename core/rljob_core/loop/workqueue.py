"""Which key is reconciled next. WorkQueue is the pure part; `run` connects a watch, the queue and its workers.

`run` consumes the keys of the watch, produces reconciles, and waits for the next key or the next due time. Invariants:
a key is never reconciled twice concurrently; a key that is added during its reconcile is reconciled again afterwards; a
key that fails backs off and delays no other key; namespaces take turns, and none holds more than half of the workers.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from datetime import datetime

from rljob_api.errors import TransientError
from rljob_core.backend import ForbiddenError, Key, UnansweredError, describe_key, utc_now

log = logging.getLogger(__name__)

INITIAL_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 300.0
_WATCH_BACKOFF_SECONDS = 1.0

Watch = Callable[[], AsyncGenerator[Key, None]]
"""Yields the keys of objects that may have changed, and from time to time all keys. Called again if it raises
TransientError."""
ReconcileKey = Callable[[Key, datetime], Awaitable[float | None]]
"""Returns the seconds after which to requeue the key; None: only when something changes."""


class WorkQueue:
    """A deduplicating, delaying queue of keys. The caller passes the times, in seconds of one clock.

    The first change of a key is taken at once. Those of the next `min_interval_seconds` are taken together. Namespaces
    take turns: a thousand keys of one delay a key of another by one reconcile. Within a namespace, keys that did not
    fail come first. Of those that got no answer, one is taken at a time: each may hold its worker for a minute.
    """

    def __init__(self, min_interval_seconds: float = 0.0) -> None:
        self._min_interval_seconds = min_interval_seconds
        self._ready: dict[str, dict[Key, None]] = {}
        """By namespace, in order of arrival; that whose turn it is comes first. None is empty."""
        self._dirty: set[Key] = set()
        self._working: set[Key] = set()
        self._delayed: list[tuple[float, Key]] = []
        self._due: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._unanswered: set[Key] = set()
        """Those of `_failures` whose last reconcile got no answer."""
        self._ready_since: dict[Key, float] = {}
        self._taken_at: dict[Key, float] = {}
        """Oldest first; only those of the last interval."""

    def add(self, key: Key) -> None:
        """Queue `key` for as soon as possible."""
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._working:
            self._ready.setdefault(key.namespace, {})[key] = None

    def add_at(self, key: Key, when: float) -> None:
        """Queue `key` for `when`, unless it is due earlier."""
        if when < self._due.get(key, float("inf")):
            self._due[key] = when
            heapq.heappush(self._delayed, (when, key))

    def add_changed(self, key: Key, now: float) -> None:
        """Queue a changed `key`: now, but not within the interval after it was last taken."""
        earliest = self._taken_at.get(key, float("-inf")) + self._min_interval_seconds
        if now >= earliest:
            self.add(key)
        elif key not in self._dirty:
            self.add_at(key, earliest)

    def take(self, now: float, max_of_namespace: float = math.inf) -> Key | None:
        """Return the next due key of a namespace with fewer keys in work than the maximum, or None. The caller must
        call `finish` or `fail` with it."""
        self._move_due(now)
        key: Key | None = None
        for namespace, ready in self._ready.items():
            working = [each for each in self._working if each.namespace == namespace]
            if len(working) >= max_of_namespace:
                continue
            barred = self._unanswered if self._unanswered.intersection(working) else set[Key]()
            allowed: Collection[Key] = [each for each in ready if each not in barred] if barred else ready
            key = next((each for each in allowed if each not in self._failures), next(iter(allowed), None))
            if key is not None:
                break
        if key is None:
            return None
        keys = self._ready.pop(key.namespace)
        del keys[key]
        if keys:
            self._ready[key.namespace] = keys  # after all others
        self._ready_since.pop(key, None)
        self._dirty.discard(key)
        self._working.add(key)
        self._taken_at.pop(key, None)
        self._taken_at[key] = now
        while now - self._taken_at[first := next(iter(self._taken_at))] > self._min_interval_seconds:
            del self._taken_at[first]
        self._due.pop(key, None)  # this reconcile replaces the delayed one
        return key

    def finish(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._unanswered.discard(key)
        self._release(key)

    def fail(self, key: Key, now: float, longest: float | None = None, *, is_unanswered: bool = False) -> float:
        """Record that the reconcile of `key` failed. Return the seconds until its retry, at most `longest`."""
        self._unanswered.add(key) if is_unanswered else self._unanswered.discard(key)
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(backoff_seconds(failures), MAX_BACKOFF_SECONDS if longest is None else longest)
        self._release(key)
        self.add_at(key, now + delay)
        return delay

    def next_due(self) -> float | None:
        """Return when the first delayed key is due; None: no key is delayed."""
        self._drop_stale()
        return self._delayed[0][0] if self._delayed else None

    @property
    def depth(self) -> int:
        """Number of keys that are ready and wait for a worker."""
        return sum(map(len, self._ready.values()))

    def oldest_age(self, now: float) -> float:
        """Return the longest wait of a ready key, counted from the first call that saw it. Those that got no answer
        wait for one another, not for workers."""
        for key in itertools.chain.from_iterable(self._ready.values()):
            if key not in self._unanswered:
                self._ready_since.setdefault(key, now)
        return now - min(self._ready_since.values(), default=now)

    @property
    def is_idle(self) -> bool:
        return not self._ready and not self._working

    def _release(self, key: Key) -> None:
        self._working.discard(key)
        if key in self._dirty:
            self._ready.setdefault(key.namespace, {})[key] = None

    def _move_due(self, now: float) -> None:
        self._drop_stale()
        while self._delayed and self._delayed[0][0] <= now:
            _, key = heapq.heappop(self._delayed)
            self._due.pop(key, None)
            self.add(key)
            self._drop_stale()

    def _drop_stale(self) -> None:
        while self._delayed and self._due.get(self._delayed[0][1]) != self._delayed[0][0]:
            heapq.heappop(self._delayed)


def backoff_seconds(failures: int) -> float:
    """Return the delay after a number of consecutive failures; it doubles with each."""
    return min(MAX_BACKOFF_SECONDS, INITIAL_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 30))


async def run(
    watch: Watch,
    reconcile_key: ReconcileKey,
    workers: int = 8,
    *,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = utc_now,
    queue: WorkQueue | None = None,
) -> None:
    """Reconcile until cancelled, or until the watch ends and all its keys are reconciled. `workers` are those of one
    namespace; others have as many."""
    queue, changed = queue or WorkQueue(), asyncio.Condition()

    async def work() -> None:
        while True:
            key = await _take(queue, changed, clock, workers)
            try:
                requeue_after = await reconcile_key(key, now())
            except TransientError as error:
                longest = error.retry_within_seconds if isinstance(error, ForbiddenError) else None
                delay = queue.fail(key, clock(), longest, is_unanswered=isinstance(error, UnansweredError))
                log.warning("%s: %s; retrying in %.1f s", describe_key(key), error, delay)
            except Exception:  # a defect must not stop the other objects
                delay = queue.fail(key, clock())
                log.exception("%s: reconcile failed; retrying in %.1f s", describe_key(key), delay)
            else:
                queue.finish(key)
                if requeue_after is not None:
                    queue.add_at(key, clock() + requeue_after)
            async with changed:
                changed.notify_all()

    tasks = [asyncio.create_task(work(), name=f"reconcile-{index}") for index in range(2 * workers)]
    try:
        await _feed(watch, queue, changed, clock)
        async with changed:
            await changed.wait_for(lambda: queue.is_idle)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(watch: Watch, queue: WorkQueue, changed: asyncio.Condition, clock: Callable[[], float]) -> None:
    """Queue the keys that the watch yields. A watch that fails is started again, and then yields every key."""
    while True:
        try:
            async with contextlib.aclosing(watch()) as keys:  # otherwise its tasks run until it is garbage-collected
                async for key in keys:
                    async with changed:
                        queue.add_changed(key, clock())
                        changed.notify()
            return
        except TransientError as error:
            log.warning("the watch failed and is started again: %s", error)
            await asyncio.sleep(_WATCH_BACKOFF_SECONDS)


async def _take(queue: WorkQueue, changed: asyncio.Condition, clock: Callable[[], float], workers: int) -> Key:
    async with changed:
        while True:
            if key := queue.take(clock(), workers):
                return key
            due = queue.next_due()
            timeout = None if due is None else max(0.0, due - clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):  # Python 3.11's wait_for may lose a cancellation
                    await changed.wait()
