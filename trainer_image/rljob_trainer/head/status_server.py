"""The driver's HTTP server: /status, /metrics, /weights/current of a StatusBoard; /samples, /hung, /rljob/leave, and
the probes.

That it answers shows that the driver's event loop runs: it has no thread of its own.
"""

import hmac
import logging
import os
import random
import time
from collections.abc import Callable

from aiohttp import web
from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.wire.contract import ENV_TOKEN, PORT_DRIVER, UrlPath
from rljob_api.wire.discovery import listening_port
from rljob_api.wire.driver_status import HungPart
from rljob_api.wire.weights import PullReport
from rljob_trainer.driver.reports import RecentSampleLog
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.stopping import NOTHING_TRAINS

NUM_PEERS = 8
"""For each replica: random ones, so that parts reach all replicas in a few hops."""
_MAX_AGE_SECONDS = 90.0
"""A replica polls at least every 30 s."""


class Peers:
    """Which replicas may give each other parts of the weights: those that poll the head and serve their download.
    Pure."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._polled_at: dict[str, float] = {}
        """By address."""

    def record(self, address: str, now: float) -> None:
        self._polled_at = {a: at for a, at in self._polled_at.items() if now - at < _MAX_AGE_SECONDS} | {address: now}

    def choose(self, address: str, now: float) -> list[str]:
        """Return peers for the replica with this address."""
        others = [a for a, at in self._polled_at.items() if a != address and now - at < _MAX_AGE_SECONDS]
        return self._rng.sample(others, min(NUM_PEERS, len(others)))


log = logging.getLogger(__name__)

_MAX_POLL_SECONDS = 60.0
_PUBLIC_PATHS = (UrlPath.READY, UrlPath.LIVE, UrlPath.METRICS)


class StatusServer:
    def __init__(
        self,
        board: StatusBoard,
        render_metrics: Callable[[], bytes],
        record_report: Callable[[PullReport], None] = lambda report: None,
        record_hung: Callable[[HungPart], None] = lambda part: None,
        recent: RecentSampleLog | None = None,
    ) -> None:
        self._board, self._record_hung = board, record_hung
        self._record_report = record_report
        self._render_metrics = render_metrics
        self._recent = recent or RecentSampleLog()
        self._peers = Peers()
        app = web.Application(middlewares=[require_token])
        app.router.add_get(UrlPath.READY, self._ready)
        app.router.add_get(UrlPath.LIVE, self._ready)
        app.router.add_post(UrlPath.HUNG, self._hung)
        app.router.add_get(UrlPath.METRICS, self._metrics)
        app.router.add_get(UrlPath.STATUS, self._status)
        app.router.add_get(UrlPath.SAMPLES, self._samples)
        app.router.add_get(UrlPath.WEIGHTS_CURRENT, self._weights)
        app.router.add_post(UrlPath.LEAVE, self._leave)
        app.router.add_get(UrlPath.MODEL, self._model)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self, address: str) -> None:
        port = listening_port(PORT_DRIVER)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, address, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                f"cannot listen on {address}:{port} (driver): {error.strerror}; stop the process that holds the port"
            ) from error

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._render_metrics(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _status(self, _: web.Request) -> web.Response:
        return web.Response(text=self._board.snapshot().model_dump_json(), content_type="application/json")

    async def _samples(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not (after.isdecimal() and after.isascii()):
            raise web.HTTPUnprocessableEntity(text=f"after must be a number, got {after}\n")
        return web.Response(text=self._recent.read(int(after)).model_dump_json(), content_type="application/json")

    async def _leave(self, _: web.Request) -> web.Response:
        leave = self._board.leave
        return web.Response(text=NOTHING_TRAINS if leave is None else await leave())

    async def _model(self, _: web.Request) -> web.Response:
        if not self._board.model:
            raise web.HTTPServiceUnavailable(text="the head has not found the model yet\n")
        return web.Response(text=self._board.model)

    async def _hung(self, request: web.Request) -> web.Response:
        try:
            part = HungPart.model_validate_json(await request.read())
        except ValidationError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        log.error("%s %s hangs: %s", part.role, part.name, part.doing)
        self._record_hung(part)
        return web.Response()

    async def _weights(self, request: web.Request) -> web.Response:
        if report := request.query.get("report"):
            try:
                self._record_report(PullReport.model_validate_json(report))
            except ValidationError as error:
                log.warning("unreadable report of a rollout: %s", error)  # its version differs
        peer = request.query.get("peer", "")
        if peer:
            self._peers.record(peer, time.monotonic())
        timeout = min(float(request.query.get("timeout", "0")), _MAX_POLL_SECONDS)
        manifest = await self._board.wait_for_manifest(request.query.get("after", ""), timeout)
        if manifest is None:
            return web.Response(status=204)
        peers = self._peers.choose(peer, time.monotonic()) if peer else []
        found = manifest.model_copy(update={"peers": peers})
        return web.Response(text=found.model_dump_json(), content_type="application/json")


@web.middleware
async def require_token(request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
    """Reject requests without the job's token, except for probes and metrics."""
    expected = f"Bearer {os.environ.get(ENV_TOKEN, '')}".encode()
    given = request.headers.get("Authorization", "").encode(errors="replace")
    if request.path not in _PUBLIC_PATHS and not hmac.compare_digest(given, expected):
        return web.Response(status=401, text="the job's token is required\n")
    return await handler(request)  # type: ignore[misc]
