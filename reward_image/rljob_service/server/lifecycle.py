"""The lifecycle of the server process: check the function, listen, serve, drain on SIGTERM, leave no process behind.

The server listens only after the function has loaded, and reports unready before it finishes its last requests.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import psutil

from rljob_api.errors import TransientError
from rljob_service.http.server import HttpServer
from rljob_service.results import StartupReport
from rljob_service.server.app import App
from rljob_service.server.executor import Executor
from rljob_service.server.metrics import ServerMetrics
from rljob_service.server.served_service import ServedService
from rljob_service.worker.sandbox.system import libc_prctl

logger = logging.getLogger(__name__)

_OWN_FILES = 128
_FILES_PER_SLOT = 8
"""Open files of a worker: its socket, its output, its pidfd, its seccomp listener, and as many while it is replaced."""
_TCP_PROBES = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds, seconds and number: a silent client is noticed after a minute."""
_GC_ALLOCATIONS = 50_000
_RESPONSE_SECONDS = 5
"""Time to send the last responses after all work has ended."""


async def check(service: ServedService) -> StartupReport:
    """Start one worker and end it again. Raise UserError if the function cannot be served."""
    executor = Executor(service, ServerMetrics(service.config.name, service.config.slots))
    try:
        return await executor.pool.start_first()
    finally:
        await executor.close()


async def run(service: ServedService, host: str, port: int, token: str, grace_seconds: float) -> None:
    """Serve until SIGTERM or SIGINT. Raise TransientError if the port is in use or workers keep dying, and UserError if
    an endpoint refuses all requests."""
    # Each connection is an open file, and the default soft limit of 1,024 is less than one queue.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    max_connections = _max_connections(hard, service.config.slots)
    listener = _bind(host, port)
    metrics = ServerMetrics(service.config.name, service.config.slots)
    executor = Executor(service, metrics)
    signaled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signaled.set)
    stop = asyncio.create_task(signaled.wait())
    orphans = Orphans(executor.pool.owns)
    try:
        report = await _start_unless_stopped(stop, executor)
        if report is None:
            return
        app = App(service, report, executor, metrics, token)
        http = HttpServer(app, max_connections)
        # Objects that exist now are permanent; later ones belong to requests, and reference counting frees them.
        gc.freeze()
        gc.set_threshold(_GC_ALLOCATIONS)
        await http.listen(listener)
        what = service.kind.describe_started(service.config, report)
        logger.info("%s %s (%s) on http://%s:%d", service.kind.noun, service.config.name, what, host, port)
        ends: set[asyncio.Future[Any]] = {stop, executor.fatal_error}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await _drain(app, executor, grace_seconds)
        await http.close(_RESPONSE_SECONDS)
        if executor.fatal_error.done():
            raise executor.fatal_error.result()
    finally:
        await executor.close()
        await orphans.end()
        listener.close()


async def _start_unless_stopped(stop: asyncio.Future[Any], executor: Executor) -> StartupReport | None:
    """Start the first worker; None if `stop` came first. An import may take minutes."""
    starting = asyncio.create_task(executor.pool.start_first())
    first: set[asyncio.Future[Any]] = {starting, stop}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return None


async def _drain(app: App, executor: Executor, grace_seconds: float) -> None:
    """Refuse new requests, finish accepted ones, cancel those that do not end within the grace period."""
    app.draining = True
    if not executor.fatal_error.done():
        logger.info("shutting down: at most %g s for accepted requests", grace_seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await executor.drained()
    await executor.close()


def _bind(host: str, port: int) -> socket.socket:
    """Bind the address without listening yet. Connections inherit the options of its socket."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # A client whose node has died sends no FIN: without probes its execution would hold a slot to its end.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_PROBES.items():
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise TransientError(
            f"cannot listen on {host}:{port}: {error.strerror}; "
            "stop the process that uses it, or pass another --host or --port"
        ) from error
    return listener


def _max_connections(max_open_files: int, slots: int) -> int:
    """Return how many connections leave enough open files for everything else, or at least half of all files."""
    return max(max_open_files // 2, max_open_files - _OWN_FILES - _FILES_PER_SLOT * slots)


_PR_SET_CHILD_SUBREAPER = 36
_REAP_SECONDS = 1.0
_KILL_TIMEOUT_SECONDS = 2.0
_POLL_SECONDS = 0.02


class Orphans:
    """Adopts orphans from the start, reaps them as they end, and kills them when the server ends."""

    def __init__(self, is_worker: Callable[[int], bool]) -> None:
        self._is_worker = is_worker
        self._loop = asyncio.get_running_loop()
        libc_prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._timer = self._loop.call_later(_REAP_SECONDS, self._tick)

    def _tick(self) -> None:
        self._reap()
        self._timer = self._loop.call_later(_REAP_SECONDS, self._tick)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are no children
            while True:
                # WNOWAIT: find out whose status it is before taking it.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or self._is_worker(ended.si_pid):
                    return  # its WorkerProcess is about to reap it; the next tick reaps the others
                os.waitpid(ended.si_pid, os.WNOHANG)

    async def end(self) -> None:
        """Kill and reap every remaining child. All workers must have ended."""
        self._timer.cancel()
        deadline = self._loop.time() + _KILL_TIMEOUT_SECONDS  # a process in an uninterruptible wait dies later
        while (children := psutil.Process().children()) and self._loop.time() < deadline:
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            await asyncio.sleep(_POLL_SECONDS)
            self._reap()
