"""/healthz, /readyz and /metrics. Invariant: a replica that merely waits for its lead is healthy."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rljob_operator.loop.metrics import Metrics
from rljob_operator.loop.workqueue import Key, KeyedQueue, describe

STUCK_SECONDS = 120.0


class Health:
    """What is known of the loop: the queue, and since when each worker is at its key."""

    def __init__(self, queue: KeyedQueue, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.queue, self.metrics, self._clock = queue, metrics, clock
        self.working: dict[Key, float] = {}
        self.is_ready: Callable[[], bool] = lambda: False
        self.why_not_ready = "starts"
        """Said by /readyz while not ready."""
        self.unheard_seconds: Callable[[], float] = lambda: 0.0
        """For how long the watches have not told of a write of our own."""

    def problem(self) -> str:
        """Why the process should be restarted; empty when it need not."""
        now = self._clock()
        if (age := self.queue.oldest_age(now)) > STUCK_SECONDS:
            return f"the oldest key has waited for {age:.0f} s"
        if (owed := self.unheard_seconds()) > STUCK_SECONDS:
            return f"the watches are stalled: a write of {owed:.0f} s ago was not told of"
        for key, since in self.working.items():
            if now - since > STUCK_SECONDS:
                return f"a worker has been at {describe(key)} for {now - since:.0f} s"
        return ""

    async def serve(self, health_port: int, metrics_port: int) -> list[web.AppRunner]:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        for port in sorted({health_port, metrics_port} - {0}):
            await web.TCPSite(runner, None, port).start()
        return [runner]

    async def _healthz(self, request: web.Request) -> web.Response:
        problem = self.problem()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    async def _readyz(self, request: web.Request) -> web.Response:
        ready = self.is_ready()
        return web.Response(text="ok" if ready else self.why_not_ready, status=200 if ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.metrics.depth.set(self.queue.depth)
        self.metrics.age.set(self.queue.oldest_age(self._clock()))
        body = generate_latest(self.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
