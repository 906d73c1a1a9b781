"""What the driver says of itself over HTTP: /status, /metrics, /weights/current, /rljob/ready.

Owns the one status object and the newest weight manifest. Decides nothing: the driver writes, others ask. Invariant:
a manifest is announced only after its file is there to be fetched.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Callable

from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.wire.contract import ENV_TOKEN, PORT_DRIVER, UrlPath
from rljob_api.wire.protocol import DriverStatus, WeightManifest

log = logging.getLogger(__name__)

_LONGEST_POLL_SECONDS = 60.0
_OPEN_PATHS = (UrlPath.READY.value, UrlPath.METRICS.value)


class Board:
    """The driver's state, as others may see it."""

    def __init__(self) -> None:
        self.status = DriverStatus()
        self.describe_live: Callable[[DriverStatus], DriverStatus] = lambda status: status
        """Fills in, at the moment of asking, what changes by the second: what is waited for, and demand."""
        self.manifest: WeightManifest | None = None
        self._announced = asyncio.Condition()

    def update(self, **fields: object) -> None:
        """Change some fields of the status."""
        self.status = DriverStatus.model_validate(self.status.model_dump() | fields)

    def enter(self, phase: str, waits_for: str = "") -> None:
        if phase != self.status.phase:
            log.debug("%s", phase)
        self.update(phase=phase, waits_for=waits_for)

    def waits_for(self, words: str) -> None:
        if words and words != self.status.waits_for:
            log.info("%s", words)
        self.update(waits_for=words)

    def snapshot(self) -> DriverStatus:
        return self.describe_live(self.status.model_copy())

    async def announce(self, manifest: WeightManifest) -> None:
        """Let every rollout know of new weights."""
        async with self._announced:
            self.manifest = manifest
            self._announced.notify_all()
        self.update(weight_version=manifest.version)

    async def newer_than(self, key: str, timeout: float) -> WeightManifest | None:
        """The newest manifest, as soon as it is another than `key`; None when none comes in time."""
        async with self._announced:
            if self._is_news(key):  # wait_for with a timeout of 0 would not even look
                return self.manifest
            try:
                async with asyncio.timeout(timeout):
                    await self._announced.wait_for(lambda: self._is_news(key))
            except TimeoutError:
                return None
            return self.manifest

    def _is_news(self, key: str) -> bool:
        return self.manifest is not None and self.manifest.key != key


class StatusServer:
    """Serves a board."""

    def __init__(self, board: Board, render_metrics: Callable[[], bytes]) -> None:
        self._board = board
        self._render_metrics = render_metrics
        self._runner: web.AppRunner | None = None

    async def start(self, address: str, port: int = PORT_DRIVER) -> None:
        app = web.Application(middlewares=[require_token])
        app.router.add_get(UrlPath.READY.value, self._ready)
        app.router.add_get(UrlPath.METRICS.value, self._metrics)
        app.router.add_get(UrlPath.STATUS.value, self._status)
        app.router.add_get(UrlPath.WEIGHTS_CURRENT.value, self._weights)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, address, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                f"{address}:{port}: the driver's port cannot be had: {error.strerror}: stop what holds it"
            ) from error

    async def close(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._render_metrics(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _status(self, _: web.Request) -> web.Response:
        return web.Response(text=self._board.snapshot().model_dump_json(), content_type="application/json")

    async def _weights(self, request: web.Request) -> web.Response:
        try:
            timeout = min(float(request.query.get("timeout", "0")), _LONGEST_POLL_SECONDS)
        except ValueError:
            return web.Response(status=422, text="timeout must be a number of seconds\n")
        manifest = await self._board.newer_than(request.query.get("after", ""), timeout)
        if manifest is None:
            return web.Response(status=204)
        return web.Response(text=manifest.model_dump_json(), content_type="application/json")


@web.middleware
async def require_token(request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
    """Everything but readiness and metrics needs the job's token."""
    expected = f"Bearer {os.environ.get(ENV_TOKEN, '')}".encode()
    given = request.headers.get("Authorization", "").encode()
    if request.path not in _OPEN_PATHS and not hmac.compare_digest(given, expected):
        return web.Response(status=401, text="the job's token is needed\n")
    return await handler(request)  # type: ignore[misc]
