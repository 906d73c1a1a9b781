"""Waiting for a replica: discovery, a fair queue of waiters, and leases. `fleet` makes the decisions.

If no request succeeds for spec.outageSeconds, every waiter gets an OutageError: waits are bounded.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rljob_api.tracing import spans
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.outages import Dependency, OutageError
from rljob_trainer.replicas.fleet import Affinity, Fleet

log = logging.getLogger(__name__)

_DISCOVERY_SECONDS = 1.0
_PREFIX_SECONDS = 5.0
"""A waiter's advantage if the replica with its prefix has room. It bounds by how much others wait longer for that."""
_TICK_SECONDS = 0.1
"""Interval at which waiters notice the end of a backoff."""


@dataclass
class ReplicaLease:
    """One request's place on one replica. Ends with its outcome; without one, as unused."""

    pool: ReplicaPool
    address: str
    _open: bool = True

    def done(self) -> None:
        self._end(self.pool.fleet.record_done)

    def answered(self) -> None:
        """The replica answered, though not with a result."""
        self._end(self.pool.fleet.record_answered)

    def failed(self, reason: str) -> None:
        log.warning("%s %s: %s", self.pool.name, self.address, reason)
        self._end(self.pool.fleet.record_failed, self.pool.now(), f"{self.address}: {reason}")

    def progressed(self) -> None:
        """The replica works on the request."""
        self.pool.fleet.record_progress(self.address, self.pool.now())

    def silent(self, seconds: float) -> None:
        """The request got nothing for `seconds`. If the replica served others meanwhile, it is only overloaded."""
        log.warning("%s %s: no token for %.0f s", self.pool.name, self.address, seconds)
        self._end(self.pool.fleet.record_silent, self.pool.now(), seconds)

    def updated(self) -> None:
        """The replica serves newer weights now than those that the request needs."""
        self._end(self.pool.fleet.record_updated)

    def busy(self, seconds: float) -> None:
        self._end(self.pool.fleet.record_busy, self.pool.now() + seconds)

    def unused(self) -> None:
        self._end(self.pool.fleet.record_unused)

    def _end(self, record: Callable[..., None], *facts: float | str) -> None:
        """`record`: of the fleet. `facts`: what it gets besides the address."""
        if self._open:
            self._open = False
            record(self.address, *facts)
            self.pool.dispatch()


@dataclass(order=True)
class _Waiter:
    since: float
    """Its place in the queue."""
    number: int
    """Number of its arrival."""
    future: asyncio.Future[str] = field(compare=False)
    """Receives the address of a replica."""
    avoid: Collection[str] = field(compare=False)
    affinity: Affinity | None = field(compare=False)


class ReplicaPool:
    def __init__(
        self,
        name: str,
        discover: Callable[[], list[str]],
        *,
        max_in_flight: int | None = None,
        health: Dependency | None = None,
        allow_empty: bool = False,
        readiness_lags: bool = True,
        spreads: bool = True,
        on_tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`health`: learns whether requests succeed, and bounds how long callers wait. `allow_empty`: another owner may
        scale the replicas to zero. `readiness_lags`, `spreads`: see Fleet. `on_tick`: called every tick, for example to
        ask replicas what they serve."""
        self.name = name
        self.allow_empty = allow_empty
        self.is_awaited = False
        """Whether a caller waits for a replica without a lease."""
        self.fleet = Fleet(health, max_in_flight=max_in_flight, readiness_lags=readiness_lags, spreads=spreads)
        self.now = clock
        self._on_tick = on_tick
        self._discover = discover
        self._waiting = defaultdict[str, list[_Waiter]](list)
        """A heap for each replica that a waiter's prefix is on, and one for the others."""
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name=f"replicas-{self.name}")

    async def close(self) -> None:
        await end_tasks(self._task)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def lease(
        self, avoid: Collection[str] = (), since: float | None = None, affinity: Affinity | None = None
    ) -> AsyncIterator[ReplicaLease]:
        """Wait for a replica, preferably one that is not in `avoid`. `since`: as if it waited since that time of the
        pool's clock; None: now. `affinity`: see Fleet.pick."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        home = affinity.address if affinity and affinity.address not in avoid else ""
        waiter = _Waiter(self.now() if since is None else since, next(self._numbers), future, avoid, affinity)
        heapq.heappush(self._waiting[home], waiter)
        with spans.span("queue", {"rljob.replicas": self.name}):
            self.dispatch()
            try:
                lease = ReplicaLease(self, await future)
            except asyncio.CancelledError:
                if future.done() and not future.cancelled() and not future.exception():
                    self.fleet.record_unused(future.result())  # cancelled after dispatch() had picked a replica
                    self.dispatch()
                raise
        try:
            yield lease
        finally:
            lease.unused()

    def try_lease(self, avoid: Collection[str]) -> ReplicaLease | None:
        """Return a lease of a replica outside `avoid`, unless another caller waits for one. The caller must end it."""
        if any(not waiter.future.done() for waiters in self._waiting.values() for waiter in waiters):
            return None
        address = self.fleet.pick(self.now(), avoid, only_others=True)
        return None if address is None else ReplicaLease(self, address)

    def dispatch(self) -> None:
        """Give usable replicas to the waiters, the longest wait first."""
        now = self.now()
        while heaps := {home: waiters for home, waiters in self._waiting.items() if waiters}:
            roomy = {replica.address for replica in self.fleet.list_usable(now)} if len(heaps) > 1 else ()
            bonus = {home: _PREFIX_SECONDS if home in roomy else 0.0 for home in heaps}
            home = min(heaps, key=lambda each: (heaps[each][0].since - bonus[each], heaps[each][0]))
            waiter = heaps[home][0]
            if not waiter.future.done():  # else the caller was cancelled
                address = self.fleet.pick(now, waiter.avoid, affinity=waiter.affinity)
                if address is None:
                    return
                waiter.future.set_result(address)
            heapq.heappop(heaps[home])

    async def _watch(self) -> None:
        await self._observe()
        async with asyncio.TaskGroup() as tasks:
            # A separate task: a DNS server that hangs must not block the dispatch of known replicas.
            tasks.create_task(self._poll_discovery())
            while True:
                self._on_tick()
                self.dispatch()
                self.fail_expired_waiters()
                await asyncio.sleep(_TICK_SECONDS)

    async def _poll_discovery(self) -> None:
        while True:
            await asyncio.sleep(_DISCOVERY_SECONDS)
            await self._observe()

    async def _observe(self) -> None:
        try:
            # In a thread: a slow resolver must not block the loop.
            self.fleet.observe_addresses(await asyncio.to_thread(self._discover))
        except OSError as error:
            log.warning("%s: discovery failed; keeping the known replicas: %s", self.name, error)

    def fail_expired_waiters(self) -> None:
        """Fail all waiters if no request has succeeded for spec.outageSeconds."""
        self.fleet.judge_health(is_awaited=self.is_awaited or bool(self.num_waiting))
        try:
            self.fleet.health.check()
        except OutageError as error:
            for waiter in itertools.chain.from_iterable(self._waiting.values()):
                if not waiter.future.done():
                    waiter.future.set_exception(error)
            self._waiting.clear()
