"""Waiting for a replica: discovery, a fair queue of those who wait, and leases. The decisions are `fleet`'s.

Consumes: the names that discovery lists, once a second. Produces: leases. Waits for: a usable replica. Unblocked by:
a lease that ends, a replica that appears, recovers or says that it serves the wanted weights. When nothing has
succeeded for `unavailable_timeout_seconds`, every waiter gets a TransientError: an answer may be late, but nobody waits for
ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rljob_api.errors import TransientError
from rljob_trainer.replicas.fleet import Fleet

log = logging.getLogger(__name__)

_DISCOVERY_SECONDS = 1.0
_TICK_SECONDS = 0.1
"""How soon a waiter learns that a pause is over."""


@dataclass(eq=False)
class _Waiter:
    future: asyncio.Future[str]
    avoid: Collection[str]


class Lease:
    """One request's right to one replica. Says how it went; `unused` unless told."""

    def __init__(self, replicas: ReplicaPool, address: str) -> None:
        self.address = address
        self._replicas = replicas
        self._open = True

    def done(self) -> None:
        self._end(lambda fleet, now: fleet.record_done(self.address))

    def failed(self, why: str) -> None:
        log.warning("%s %s: %s", self._replicas.name, self.address, why)
        self._end(lambda fleet, now: fleet.record_failed(self.address, now))

    def busy(self, seconds: float) -> None:
        self._end(lambda fleet, now: fleet.record_busy(self.address, now + seconds))

    def unused(self) -> None:
        self._end(lambda fleet, now: fleet.record_unused(self.address))

    def _end(self, record: Callable[[Fleet, float], None]) -> None:
        if self._open:
            self._open = False
            record(self._replicas.fleet, self._replicas.now())
            self._replicas.dispatch()


class ReplicaPool:
    """The replicas of one role, for all who want to ask one."""

    def __init__(
        self,
        name: str,
        discover: Callable[[], list[str]],
        *,
        max_in_flight: int | None = None,
        unavailable_timeout_seconds: float = 600.0,
        allow_empty: bool = False,
        readiness_lags: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`allow_empty`: there may be no replica at all for a while, as somebody else decides how many there are;
        patience is for replicas that exist and fail."""
        self.name = name
        self.allow_empty = allow_empty
        self.fleet = Fleet(max_in_flight=max_in_flight, readiness_lags=readiness_lags)
        self.now = clock
        self.on_tick: Callable[[], None] = lambda: None
        """Called some times a second; `rollouts` asks there who serves what."""
        self._discover = discover
        self.unavailable_timeout_seconds = unavailable_timeout_seconds
        self._waiting: deque[_Waiter] = deque()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name=f"replicas-{self.name}")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def lease(self, avoid: Collection[str] = ()) -> AsyncIterator[Lease]:
        """A replica, as soon as there is one; preferably none of `avoid`."""
        lease = Lease(self, await self._acquire(avoid))
        try:
            yield lease
        finally:
            lease.unused()

    def try_lease(self, avoid: Collection[str]) -> Lease | None:
        """A place on a replica that is none of `avoid`, if nobody waits for it. To be ended by the caller."""
        if any(not waiter.future.done() for waiter in self._waiting):
            return None
        address = self.fleet.pick(self.now(), avoid, only_others=True)
        return None if address is None else Lease(self, address)

    async def _acquire(self, avoid: Collection[str]) -> str:
        waiter = _Waiter(asyncio.get_running_loop().create_future(), avoid)
        self._waiting.append(waiter)
        self.dispatch()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and not waiter.future.exception():
                self.fleet.record_unused(waiter.future.result())  # cancelled in the moment of being served
                self.dispatch()
            raise

    def dispatch(self) -> None:
        """Serve those who wait, first come first served, as far as replicas go."""
        while self._waiting:
            waiter = self._waiting[0]
            if waiter.future.done():  # its asker was cancelled
                self._waiting.popleft()
                continue
            address = self.fleet.pick(self.now(), waiter.avoid)
            if address is None:
                return
            self._waiting.popleft()
            waiter.future.set_result(address)

    async def _watch(self) -> None:
        await self._observe()
        async with asyncio.TaskGroup() as tasks:
            # By itself: a name server that does not answer must not keep known replicas from those who wait.
            tasks.create_task(self._poll_discovery())
            while True:
                self.on_tick()
                self.dispatch()
                self.fail_expired_waiters(bool(self._waiting))
                await asyncio.sleep(_TICK_SECONDS)

    async def _poll_discovery(self) -> None:
        while True:
            await asyncio.sleep(_DISCOVERY_SECONDS)
            await self._observe()

    async def _observe(self) -> None:
        try:
            # In a thread: a slow resolver must not hold up the loop.
            self.fleet.observe_addresses(await asyncio.to_thread(self._discover))
        except OSError as error:
            log.warning("%s: discovery failed, going on with what is known: %s", self.name, error)

    def fail_expired_waiters(self, anybody_waits: bool) -> None:
        """Fail all who wait once nothing has succeeded for too long."""
        if self.allow_empty and not self.fleet.replicas:
            self.fleet.failing_since = None
            return
        if anybody_waits:
            self.fleet.record_no_replica(self.now())
        elif self.fleet.is_idle():
            self.fleet.failing_since = None  # nothing can succeed while nobody asks
        since = self.fleet.failing_since
        if since is None or self.now() - since < self.unavailable_timeout_seconds:
            return
        error = TransientError(f"{self.name}: no replica has answered for {self.unavailable_timeout_seconds:.0f} s")
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.future.done():
                waiter.future.set_exception(error)
