"""An HTTP proxy between one operator and the API server that injects faults.

Owns the faults: answers of 409, 410, 429, 500 and 503, connections that are cut or stay without an answer, before or
after the request was executed, watches that become silent, end or expire, and the operator's death. All other answers
are the API server's. Lease requests always pass, so that faults hit the work.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import yarl
from aiohttp import web

Manifest = dict[str, Any]
OnWrite = Callable[[str, Manifest, Manifest], None]
"""Called with the path, the request and the answer of each write that the API server has executed."""
LATE_SECONDS = 0.3
_REASONS = {
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}
WRITE_FAULTS = ("409", "429", "503", "cut", "late", "lost", "death before", "death after")
"""lost: executed, but the answer is cut off. death: like kill -9, before or after the write is executed."""
TIMEOUT_FAULTS = ("timeout before", "timeout after")
"""The client waits for an answer until its timeout, before or after the write is executed."""
LIST_FAULTS = ("410", "503", "cut", "late")


@dataclass
class Faults:
    """The next faults of a test's operators, by the number of a write or a LIST since `arm`."""

    writes: dict[int, str] = field(default_factory=dict)
    lists: dict[int, str] = field(default_factory=dict)
    expired_watches: int = 0
    """The number of watches to answer with 'resourceVersion too old'."""
    are_watches_silent: bool = False
    """Watches stay open without events."""
    injected: Counter[str] = field(default_factory=Counter)
    ever_injected: Counter[str] = field(default_factory=Counter)
    """The same; never reset."""
    num_writes: int = 0
    """Write requests so far, without those of the Lease."""

    def arm(self, writes: dict[int, str], lists: dict[int, str]) -> None:
        self.writes, self.lists = dict(writes), dict(lists)

    def stop(self) -> None:
        self.arm({}, {})
        self.expired_watches, self.are_watches_silent = 0, False

    @property
    def are_exhausted(self) -> bool:
        return not self.writes and not self.lists

    def next_fault(self, *, is_write: bool) -> str:
        """Count a request and return its fault."""
        self.num_writes += is_write
        faults = self.writes if is_write else self.lists
        fault = faults.pop(1, "")
        shifted = {number - 1: kind for number, kind in faults.items()}
        faults.clear()
        faults.update(shifted)
        self.count(fault)
        return fault

    def count(self, fault: str) -> None:
        if fault:
            self.injected[fault] += 1
            self.ever_injected[fault] += 1


class FaultProxy:
    """The proxy of one operator. Once `has_died` is set, nothing passes."""

    def __init__(self, upstream: aiohttp.ClientSession, server: str, faults: Faults, on_write: OnWrite) -> None:
        self._upstream, self._server, self._faults, self._on_write = upstream, server, faults, on_write
        self._streams: set[asyncio.Task[Any]] = set()
        self.has_died = asyncio.Event()
        self.num_resyncs = 0
        """Answered LISTs of Pods, which end each round of LISTs."""

    async def open(self, address: str) -> str:
        """Listen on a free port and return the URL."""
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def close(self) -> None:
        self.drop_watches()
        await self._runner.cleanup()

    def drop_watches(self) -> None:
        """Cut every open watch."""
        for stream in self._streams:
            stream.cancel()

    def die(self) -> None:
        self.has_died.set()
        self.drop_watches()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.has_died.is_set():
            return _cut(request)
        if "watch" in request.query:
            return await self._watch(request)
        is_write, is_lease = request.method != "GET", "/leases" in request.path
        is_list = not is_write and "limit" in request.query
        fault = self._faults.next_fault(is_write=is_write) if (is_write and not is_lease) or is_list else ""
        if fault.isdigit():
            return _refuse(int(fault))
        if fault == "death before":
            self.die()
        if fault in ("cut", "death before"):
            return _cut(request)
        if fault == "timeout before":
            await self.has_died.wait()  # the client gives up first, which cancels this handler
        if fault == "late":
            await asyncio.sleep(LATE_SECONDS)
        return await self._pass(request, fault)

    async def _pass(self, request: web.Request, fault: str) -> web.StreamResponse:
        sent = await request.read()
        async with self._forward(request, sent) as response:
            code, raw = response.status, await response.read()
        is_stored = "/leases" not in request.path and "dryRun" not in request.query
        if request.method != "GET" and code < 300 and is_stored:
            self._on_write(request.path, json.loads(sent or b"{}"), json.loads(raw))
        if request.method == "GET" and request.path.endswith("/pods") and code == 200:
            self.num_resyncs += 1
        if fault == "death after":
            self.die()
        if fault == "timeout after":
            await self.has_died.wait()
        if fault == "lost" or self.has_died.is_set():
            return _cut(request)
        return web.Response(body=raw, status=code, content_type="application/json")

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self._faults.expired_watches > 0:
            self._faults.expired_watches -= 1
            self._faults.count("expired")
            gone = {"type": "ERROR", "object": _build_status(410)}
            return web.Response(text=json.dumps(gone) + "\n", content_type="application/json")
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            async with self._forward(request, b"") as response:
                answer.set_status(response.status)
                await answer.prepare(request)
                async for line in response.content:
                    if not self._faults.are_watches_silent:
                        await answer.write(line)
                    else:
                        self._faults.count("silent")
        except (asyncio.CancelledError, aiohttp.ClientError, ConnectionError):
            _cut(request)
        finally:
            self._streams.discard(task)
        return answer

    def _forward(self, request: web.Request, body: bytes) -> Any:
        headers = {name: request.headers[name] for name in ("Content-Type", "Accept") if name in request.headers}
        url = yarl.URL(self._server + request.raw_path, encoded=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return self._upstream.request(
            request.method, url, data=body or None, headers=headers, timeout=timeout, read_bufsize=1 << 22
        )


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)


def _build_status(code: int) -> Manifest:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": _REASONS[code]}
    return status | {"message": f"{_REASONS[code]}: injected by the test"}


def _refuse(code: int) -> web.Response:
    return web.json_response(_build_status(code), status=code)
