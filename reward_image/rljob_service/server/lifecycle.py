"""The lifecycle of the server process: check the function, listen, serve, drain on SIGTERM, leave no process behind.

The server listens only after the function has loaded, and reports unready before it finishes its last requests.

App has the routes: the token, status codes, and from a request's body to the Executor. It leaves connections to http,
the work to Executor, and what a request must be to the kind of the service. Invariant: nothing of a request's body is
kept before its token and its path have been checked.
"""

import asyncio
import contextlib
import gc
import hmac
import json
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import psutil

from rljob_api.errors import TransientError
from rljob_api.wire import contract
from rljob_service.http.server import HttpServer, Request
from rljob_service.kinds import ENDPOINTS, Endpoint
from rljob_service.results import StartupReport
from rljob_service.server import bodies
from rljob_service.server import metrics as metrics_module
from rljob_service.server.executor import Executor, QueueFullError
from rljob_service.server.metrics import ServerMetrics
from rljob_service.server.served_service import ServedService
from rljob_service.server.traces import begin_request
from rljob_service.worker.sandbox.system import libc_prctl

_TEXT = b"text/plain; charset=utf-8"


class App:
    """The http.Handler of this server."""

    def __init__(
        self, service: ServedService, report: StartupReport, executor: Executor, metrics: ServerMetrics, token: str
    ) -> None:
        self._service = service
        self._refusals = {path: service.kind.refuse_path(path, service.config) for path in ENDPOINTS}
        """By path; empty for those that it serves."""
        self._max_body_bytes = {path: each.max_body_bytes(service.config) for path, each in ENDPOINTS.items()}
        self._report = report
        self._executor = executor
        self._metrics = metrics
        self._authorization = f"Bearer {token}".encode()
        self.draining = False
        self.record_response = metrics.record_response
        self._open_routes = {
            contract.UrlPath.READY.encode(): self._ready,
            contract.UrlPath.LIVE.encode(): self._live,
            contract.UrlPath.METRICS.encode(): self._render_metrics,
        }
        self._get_routes = self._open_routes | {contract.UrlPath.INFO.encode(): self._info}

    def admit(self, request: Request) -> int:
        path = request.path
        if path not in self._open_routes:
            if not hmac.compare_digest(request.authorization, self._authorization):
                request.reject(401, "needs `Authorization: Bearer $RLJOB_TOKEN`")
                return 0
            request.record_authenticated()
        if (endpoint := ENDPOINTS.get(path)) is not None:
            if request.method != b"POST":
                request.reject(405, f"POST a {endpoint.request.__name__}", (b"allow", b"POST"))
            elif refusal := self._refusals[path]:
                request.reject(422, refusal)
            return self._max_body_bytes[path]
        if path not in self._get_routes:
            request.reject(404, "no such path")
        elif request.method not in (b"GET", b"HEAD"):
            request.reject(405, "use GET", (b"allow", b"GET, HEAD"))
        return 0

    def handle(self, request: Request) -> None:
        if (endpoint := ENDPOINTS.get(request.path)) is not None:
            self._execute(endpoint, request)
        else:
            self._get_routes[request.path](request)

    def _execute(self, endpoint: Endpoint, request: Request) -> None:
        traceparent = begin_request(request)
        if self.draining:
            return request.refuse(503, "the server is shutting down; use another replica")
        try:
            message = bodies.parse(endpoint.request, request.body)
            if isinstance(message, bodies.Unscorable):
                return self._executor.reject(message, request)
            if problem := self._service.kind.find_problem(message, self._service.config):
                return request.refuse(422, problem)
            self._executor.submit(message, request.body, request, traceparent)
        except bodies.MalformedError as error:
            request.refuse(422, str(error))
        except QueueFullError as error:
            request.refuse(429, str(error), (b"retry-after", str(error.retry_after_seconds).encode()))

    def _info(self, request: Request) -> None:
        service, report = self._service, self._report
        info = {
            "name": service.config.name,
            "signature": report.signature,
            "entrypoint": report.entrypoint,
            "slots": service.config.slots,
            "reads": report.reads,
            "takes_groups": report.takes_groups,
            "version": service.version,
            "not_enforced": report.missing,
            **service.kind.facts(service.config, report),
        }
        request.respond(200, json.dumps(info).encode())

    def _ready(self, request: Request) -> None:
        if self.draining:
            request.respond(503, b"shutting down\n", content_type=_TEXT)
        elif not self._executor.pool.can_serve:
            request.respond(503, b"no worker is ready\n", content_type=_TEXT)
        else:
            notice = self._executor.pool.notice
            request.respond(200, f"ready{notice and ': '}{notice}\n".encode(), content_type=_TEXT)

    def _live(self, request: Request) -> None:
        """That this is answered shows that the event loop is not blocked."""
        request.respond(200, b"alive\n", content_type=_TEXT)

    def _render_metrics(self, request: Request) -> None:
        request.respond(200, self._metrics.render(), content_type=metrics_module.CONTENT_TYPE.encode())


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
