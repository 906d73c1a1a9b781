"""Serves /healthz, /readyz and /metrics, and measures how long the event loop is blocked.

Invariants: a replica that waits for the leader's Lease is healthy, and so is a leader whose reconciles end, however
many keys wait.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rljob_core.backend import Key, describe_key
from rljob_core.loop.failures import RefusedStatus
from rljob_core.loop.workqueue import WorkQueue
from rljob_operator.metrics import OperatorMetrics

STUCK_SECONDS = 120.0
_STALL_SAMPLE_SECONDS = 0.1


class Health:
    """The state of the work queue, of the workers and of the watches."""

    def __init__(
        self,
        queue: WorkQueue,
        metrics: OperatorMetrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_listed: Callable[[], bool] = lambda: True,
        unconfirmed_write_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`has_listed`: whether the leader knows all objects. `unconfirmed_write_seconds`: the age of the oldest write
        that no watch event has confirmed."""
        self.queue, self.metrics, self._clock = queue, metrics, clock
        self._has_listed, self._unconfirmed_write_seconds = has_listed, unconfirmed_write_seconds
        self._started_at: dict[Key, float] = {}
        """When the current reconcile of each key started."""
        self._ended_at = float("-inf")
        """When the last reconcile ended, whatever its outcome."""
        self._waits_for = "starting"
        """The answer of /readyz; empty: ready."""
        self._is_leading = False
        self.refused_statuses: Mapping[Key, RefusedStatus] = {}
        """Statuses that the API server does not store."""

    def wait_for(self, reason: str) -> None:
        """The process is not ready, since it waits for something."""
        self._waits_for = reason

    def stand_by(self) -> None:
        """The process is ready to lead."""
        self._waits_for = ""

    def lead(self) -> None:
        """The process leads, and is ready once it knows all objects."""
        self._waits_for, self._is_leading = "", True

    @contextmanager
    def track_reconcile(self, key: Key) -> Iterator[None]:
        self._started_at[key] = self._clock()
        try:
            yield
        finally:
            del self._started_at[key]
            self._ended_at = self._clock()

    async def measure_stalls(self) -> None:
        """Record how late the loop runs what is due, until cancelled."""
        while True:
            due = self._clock() + _STALL_SAMPLE_SECONDS
            await asyncio.sleep(_STALL_SAMPLE_SECONDS)
            self.metrics.loop_stall.observe(max(0.0, self._clock() - due))

    def problem(self) -> str:
        """Return why the process must be restarted; empty if it need not."""
        now = self._clock()
        # A long queue alone does not count: a new leader would have to reconcile the same keys.
        if (age := min(self.queue.oldest_age(now), now - self._ended_at)) > STUCK_SECONDS:
            return f"keys wait, and no reconcile has ended for {age:.0f} s"
        if (age := self._unconfirmed_write_seconds()) > STUCK_SECONDS:
            return f"the watches are stalled: no event has confirmed a write of {age:.0f} s ago"
        for key, started_at in self._started_at.items():
            if now - started_at > STUCK_SECONDS:
                return f"the reconcile of {describe_key(key)} has taken {now - started_at:.0f} s"
        return ""

    async def serve(self, health_port: int, metrics_port: int) -> web.AppRunner:
        """Serve everything on each port that is not 0."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        for port in sorted({health_port, metrics_port} - {0}):
            await web.TCPSite(runner, None, port).start()
        return runner

    async def _healthz(self, request: web.Request) -> web.Response:
        problem = self.problem()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    async def _readyz(self, request: web.Request) -> web.Response:
        is_listing = self._is_leading and not self._has_listed()
        problem = "listing every kind for the first time" if is_listing else self._waits_for
        if (refused := next(iter(self.refused_statuses.items()), None)) and not problem:
            problem = f"the API server refuses the status of {describe_key(refused[0])}: {refused[1].why}"
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.metrics.depth.set(self.queue.depth)
        self.metrics.age.set(self.queue.oldest_age(self._clock()))
        self.metrics.refused_statuses.set(len(self.refused_statuses))
        body = generate_latest(self.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
