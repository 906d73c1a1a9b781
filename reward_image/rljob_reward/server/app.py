"""The HTTP face: /v1/score and /v1/score-group on a short path of their own, everything else through Starlette.

Owns authentication, parsing, status codes and the watch for clients that leave. Leaves the work to Scorer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Coroutine
from typing import NamedTuple

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rljob_api.wire import contract
from rljob_api.wire.protocol import GroupRequest, ScoreRequest
from rljob_reward.server import metrics as metrics_module
from rljob_reward.server.metrics import Metrics
from rljob_reward.server.responses import Request as AnyRequest
from rljob_reward.server.scoring import QueueFullError, Scorer
from rljob_reward.server.served_reward import Program
from rljob_reward.workers.process import Started

_OPEN_PATHS = {contract.UrlPath.READY.value, contract.UrlPath.METRICS.value}
_JSON = (b"content-type", b"application/json")
_SHUTTING_DOWN = "the server is shutting down; ask another replica"


class Door(NamedTuple):
    """A path that requests to score come in by."""

    request: type[ScoreRequest] | type[GroupRequest]
    max_body_bytes: int
    scopes: tuple[str, ...]
    """Of the rewards that have it."""
    remedy: str
    """For a request to another one."""


_DOORS = {
    contract.UrlPath.SCORE.value: Door(
        ScoreRequest,
        16 << 20,
        ("sample", "sampleThenGroup"),
        f"POST whole groups to {contract.UrlPath.SCORE_GROUP}, or set scope: sample",
    ),
    contract.UrlPath.SCORE_GROUP.value: Door(
        GroupRequest,
        48 << 20,  # a worker's frame holds it
        ("group", "sampleThenGroup"),
        f"POST each sample to {contract.UrlPath.SCORE}, or set scope: group",
    ),
}


class Client:
    """The client of one request, for whom a result is to come."""

    __slots__ = ("_receive", "result")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def deliver(self, result: bytes) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def has_left(self) -> bool:
        """One look, without a task that waits: receive() suspends while the client is there, and returns once not."""
        look = self._receive()
        assert isinstance(look, Coroutine)
        try:
            look.send(None)
        except StopIteration as message:
            return bool(message.value["type"] == "http.disconnect")
        look.close()
        return False


class App:
    """ASGI application of one reward."""

    def __init__(self, program: Program, started: Started, scorer: Scorer, metrics: Metrics, token: str) -> None:
        self._program = program
        self._started = started
        self._scorer = scorer
        self._metrics = metrics
        self._authorization = f"Bearer {token}".encode()
        self.draining = False
        self._other = Starlette(
            routes=[
                Route(contract.UrlPath.INFO, self._info),
                Route(contract.UrlPath.READY, self._ready),
                Route(contract.UrlPath.METRICS, self._render_metrics),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path not in _OPEN_PATHS and not self._authorized(scope):
            await _refuse(send, 401, "needs `Authorization: Bearer $RLJOB_TOKEN`")
        elif (door := _DOORS.get(path)) is None:
            await self._other(scope, receive, send)
        elif scope["method"] != "POST":
            await _refuse(send, 405, f"POST a {door.request.__name__}", (b"allow", b"POST"))
        else:
            await self._score(door, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._authorization)

    async def _score(self, door: Door, receive: Receive, send: Send) -> None:
        if self.draining:
            return await _refuse(send, 503, _SHUTTING_DOWN)
        scope = self._program.scope
        if scope not in door.scopes:
            return await _refuse(send, 422, f"this reward has scope: {scope}; {door.remedy}")
        body = await _read_body(receive, door.max_body_bytes)
        if body is None:
            return await _refuse(send, 413, f"a request may have {door.max_body_bytes} bytes")
        if self.draining:  # since while the body came; nobody may be left who could answer
            return await _refuse(send, 503, _SHUTTING_DOWN)
        client = Client(receive)
        try:
            request = door.request.model_validate_json(body)
            if problem := _find_problem(request, scope):
                return await _refuse(send, 422, problem)
            self._scorer.submit(request, body, client)
        except ValidationError as error:
            return await _refuse(send, 422, _describe(error))
        except QueueFullError as error:
            retry_after = str(error.retry_after_seconds).encode()
            return await _refuse(send, 429, str(error), (b"retry-after", retry_after))
        await _answer(send, 200, await client.result)

    async def _info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "name": self._program.name,
                "signature": self._started.signature,
                "entrypoint": self._started.entrypoint,
                "scope": self._program.scope,
                "slots": self._program.slots,
                "version": self._program.version,
                "not_enforced": self._started.missing,
            }
        )

    async def _ready(self, request: Request) -> Response:
        if self.draining:
            return PlainTextResponse("shutting down\n", 503)
        if not self._scorer.pool.can_serve:
            return PlainTextResponse("nothing that could execute a request is up\n", 503)
        return PlainTextResponse("ready\n")

    async def _render_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=metrics_module.CONTENT_TYPE)


def _find_problem(request: AnyRequest, scope: str) -> str:
    """Why the reward cannot score a request that is well-formed; empty where it can."""
    if isinstance(request, ScoreRequest):
        return ""
    if scope == "sampleThenGroup" and request.results is None:
        return f"results: must be what each sample got at {contract.UrlPath.SCORE} (scope: sampleThenGroup)"
    if scope == "group" and request.results is not None:
        return "results: must be null: with scope: group no sample was scored alone"
    return ""


async def _read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """The request's body; None when it is too long."""
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        return body if len(body) <= max_bytes else None
    chunks, num_bytes = [body], len(body)
    while message.get("more_body", False) and num_bytes <= max_bytes:
        message = await receive()
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
    return b"".join(chunks) if num_bytes <= max_bytes else None


def _describe(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False))


async def _refuse(send: Send, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
    await _answer(send, status, json.dumps({"detail": detail}).encode(), *headers)


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})
