"""The ASGI app: routes /v1/score and /v1/score-group itself, for speed, and everything else through Starlette.

Owns authentication, parsing, status codes and the detection of disconnected clients. Leaves the work to Scorer.
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
from rljob_reward.results import StartupReport
from rljob_reward.server import metrics as metrics_module
from rljob_reward.server.metrics import ServerMetrics
from rljob_reward.server.scoring import QueueFullError, Scorer
from rljob_reward.server.served_reward import ServedReward

_OPEN_PATHS = {contract.UrlPath.READY.value, contract.UrlPath.METRICS.value}
_JSON = (b"content-type", b"application/json")


class ScoreEndpoint(NamedTuple):
    request: type[ScoreRequest] | type[GroupRequest]
    max_body_bytes: int
    scopes: tuple[str, ...]
    """Scopes of the rewards that serve this path."""
    remedy: str
    """For a request to a reward of another scope."""


_SCORE_ENDPOINTS = {
    contract.UrlPath.SCORE.value: ScoreEndpoint(
        ScoreRequest,
        16 << 20,
        ("sample", "sampleThenGroup"),
        f"POST whole groups to {contract.UrlPath.SCORE_GROUP}, or set scope: sample",
    ),
    contract.UrlPath.SCORE_GROUP.value: ScoreEndpoint(
        GroupRequest,
        48 << 20,  # less than MAX_FRAME_BYTES of a worker
        ("group", "sampleThenGroup"),
        f"POST each sample to {contract.UrlPath.SCORE}, or set scope: group",
    ),
}


class Client:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def deliver(self, response: bytes) -> None:
        if not self.response.done():
            self.response.set_result(response)

    def is_disconnected(self) -> bool:
        """Poll once, without a waiting task: receive() suspends while the client is connected, else it returns."""
        poll = self._receive()
        assert isinstance(poll, Coroutine)
        try:
            poll.send(None)
        except StopIteration as message:
            return bool(message.value["type"] == "http.disconnect")
        poll.close()
        return False


class App:
    def __init__(
        self, reward: ServedReward, report: StartupReport, scorer: Scorer, metrics: ServerMetrics, token: str
    ) -> None:
        self._reward = reward
        self._report = report
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
        path = scope["path"]
        if path not in _OPEN_PATHS and not self._authorized(scope):
            await _refuse(send, 401, "needs `Authorization: Bearer $RLJOB_TOKEN`")
        elif (endpoint := _SCORE_ENDPOINTS.get(path)) is None:
            await self._other(scope, receive, send)
        elif scope["method"] != "POST":
            await _refuse(send, 405, f"POST a {endpoint.request.__name__}", (b"allow", b"POST"))
        else:
            await self._score(endpoint, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._authorization)

    async def _score(self, endpoint: ScoreEndpoint, receive: Receive, send: Send) -> None:
        scope = self._reward.config.scope
        if scope not in endpoint.scopes:
            return await _refuse(send, 422, f"this reward has scope: {scope}; {endpoint.remedy}")
        body = await _read_body(receive, endpoint.max_body_bytes)
        if body is None:
            return await _refuse(send, 413, f"the request body must have at most {endpoint.max_body_bytes} bytes")
        if self.draining:
            return await _refuse(send, 503, "the server is shutting down; use another replica")
        client = Client(receive)
        try:
            request = endpoint.request.model_validate_json(body)
            if problem := _find_problem(request, scope):
                return await _refuse(send, 422, problem)
            self._scorer.submit(request, body, client)
        except ValidationError as error:
            return await _refuse(send, 422, _describe(error))
        except QueueFullError as error:
            retry_after = str(error.retry_after_seconds).encode()
            return await _refuse(send, 429, str(error), (b"retry-after", retry_after))
        await _respond(send, 200, await client.response)

    async def _info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "name": self._reward.config.name,
                "signature": self._report.signature,
                "entrypoint": self._report.entrypoint,
                "scope": self._reward.config.scope,
                "slots": self._reward.config.slots,
                "version": self._reward.version,
                "not_enforced": self._report.missing,
            }
        )

    async def _ready(self, request: Request) -> Response:
        if self.draining:
            return PlainTextResponse("shutting down\n", 503)
        if not self._scorer.pool.can_serve:
            return PlainTextResponse("no worker is ready\n", 503)
        return PlainTextResponse("ready\n")

    async def _render_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=metrics_module.CONTENT_TYPE)


def _find_problem(request: ScoreRequest | GroupRequest, scope: str) -> str:
    """Return why the reward cannot score a well-formed request; empty if it can."""
    if isinstance(request, ScoreRequest):
        return ""
    if scope == "sampleThenGroup" and request.results is None:
        return f"results: must be the result of each sample from {contract.UrlPath.SCORE} (scope: sampleThenGroup)"
    if scope == "group" and request.results is not None:
        return "results: must be null; with scope: group samples have no individual results"
    return ""


async def _read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return the request's body; None when it is too long."""
    chunks: list[bytes] = []
    num_bytes, more = 0, True
    while more and num_bytes <= max_bytes:
        message = await receive()
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        more = message.get("more_body", False)
    return b"".join(chunks) if num_bytes <= max_bytes else None


def _describe(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False))


async def _refuse(send: Send, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
    await _respond(send, status, json.dumps({"detail": detail}).encode(), *headers)


async def _respond(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})
