"""The life of the server process: check the function, listen, serve, drain on SIGTERM, leave no process behind.

Nothing listens before the function is known to be good, and readiness goes down before the last request is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from rljob_api.errors import TransientError
from rljob_reward.server.app import App
from rljob_reward.server.metrics import Metrics
from rljob_reward.server.scoring import Scorer
from rljob_reward.server.served_reward import Program
from rljob_reward.workers.orphans import Orphans
from rljob_reward.workers.process import Started

logger = logging.getLogger(__name__)

_BACKLOG = 8192
_KEEP_ALIVE_SECONDS = 120
"""Longer than clients keep an idle connection, so that it is they who close it and no request meets a closed one."""
_GC_ALLOCATIONS = 50_000
_ANSWER_SECONDS = 5
"""Time for the last answers to leave after all work has ended."""


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to run(), which drains first."""
        yield


async def check(program: Program) -> Started:
    """Start one worker and end it again: UserError when the function cannot be served."""
    scorer = Scorer(program, Metrics(program.name, program.slots))
    try:
        return await scorer.start()
    finally:
        await scorer.close()


async def run(program: Program, host: str, port: int, token: str, grace_seconds: float) -> None:
    """Serve until SIGTERM or SIGINT. TransientError when the port is taken or workers cannot be kept alive."""
    _raise_open_files_limit()
    listener = _bind(host, port)
    metrics = Metrics(program.name, program.slots)
    scorer = Scorer(program, metrics)
    stop = _catch_signals()
    orphans = Orphans(scorer.pool.owns)
    try:
        started = await _start_unless(stop, scorer)
        if started is None:
            return
        app = App(program, started, scorer, metrics, token)
        http = _build_http(app)
        # What exists now stays; what comes later are requests, which reference counts alone free.
        gc.freeze()
        gc.set_threshold(_GC_ALLOCATIONS)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        what = f"{started.signature}, scope {program.scope}"
        logger.info("reward %s (%s) on http://%s:%d", program.name, what, host, port)
        ends: set[asyncio.Future[Any]] = {serving, stop, scorer.hopeless}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await _drain(app, scorer, grace_seconds)
        http.should_exit = True
        await serving
        if scorer.hopeless.done():
            raise scorer.hopeless.result()
    finally:
        await scorer.close()
        await orphans.end()
        listener.close()


async def _start_unless(stop: asyncio.Future[None], scorer: Scorer) -> Started | None:
    """Start the first worker; None when `stop` came first, since an import may take minutes."""
    starting = asyncio.create_task(scorer.start())
    first: set[asyncio.Future[Any]] = {starting, stop}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return None


async def _drain(app: App, scorer: Scorer, grace_seconds: float) -> None:
    """Refuse new work, finish what was accepted, cancel what does not end within the grace."""
    app.draining = True
    if not scorer.hopeless.done():
        logger.info("shutting down: at most %g s for the requests that were accepted", grace_seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await scorer.drained()
    await scorer.close()


def _catch_signals() -> asyncio.Future[None]:
    """Done at the first SIGTERM or SIGINT; later ones change nothing."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if not stop.done():
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


def _bind(host: str, port: int) -> socket.socket:
    """The address, taken at once but not yet listening."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise TransientError(
            f"cannot listen on {host}:{port}: {error.strerror}. End what uses it, or give another --host or --port"
        ) from error
    return listener


def _build_http(app: App) -> uvicorn.Server:
    return _Http(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_ANSWER_SECONDS,
        )
    )


def _raise_open_files_limit() -> None:
    """Each connection is a file, and the default soft limit of 1,024 is less than one queue."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
