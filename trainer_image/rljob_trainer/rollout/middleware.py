"""The ASGI layer in front of every path of vLLM's server: the token, readiness, and the weights served.

Closed by default: every path except readiness and metrics needs the job's token, whether it exists or not. Serves READY
and ROLLOUT_WEIGHTS from the replica's state, which the weight puller owns. Adds headers with the weights to responses.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from rljob_api.wire.contract import HEADER_WEIGHTS, HEADER_WEIGHTS_BEGIN, UrlPath
from rljob_trainer.rollout.puller import ReplicaState

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN_PATHS = frozenset({UrlPath.READY, UrlPath.METRICS})
_MAX_WAIT_SECONDS = 60.0
_WEBSOCKET_POLICY_VIOLATION = 1008


class RolloutMiddleware:
    """Wraps vLLM's app. Must be the outermost layer, so that no part of vLLM responds before it."""

    def __init__(self, app: App, *, token: str, state: ReplicaState) -> None:
        if not token:
            raise ValueError("a rollout needs the job's token, got an empty string")
        self._app, self._state = app, state
        self._authorization = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path not in _OPEN_PATHS and not self._is_authorized(scope):
            await self._reject(scope, send)
        elif path == UrlPath.READY:
            reason = self._state.reason_not_ready()
            await _respond(send, 503 if reason else 200, reason or "ready")
        elif path == UrlPath.ROLLOUT_WEIGHTS:
            await self._respond_weights(scope, send)
        elif self._state.is_broken and path.startswith("/v1/"):
            await _respond(send, 503, f"the engine's weights are undefined after a failed update: {self._state.error}")
        else:
            await self._app(scope, receive, self._label(send))

    def _is_authorized(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._authorization)

    async def _reject(self, scope: Scope, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _WEBSOCKET_POLICY_VIOLATION})
        else:
            await _respond(send, 401, "the job's token is required: Authorization: Bearer TOKEN")

    async def _respond_weights(self, scope: Scope, send: Send) -> None:
        """Respond with the weights served. With ?want=G:V, first wait until they are that new, up to the timeout."""
        fields = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        query = {name: values[-1] for name, values in fields.items()}
        try:
            if "want" in query:
                await self._wait_for(query["want"], float(query.get("timeout", "30")))
        except ValueError:
            await _respond(send, 400, "want must be GENERATION:VERSION, and timeout a number of seconds")
            return
        body = self._state.serving.model_dump_json()
        await _respond(send, 200, body, "application/json")

    async def _wait_for(self, want: str, timeout: float) -> None:
        generation, _, version = want.rpartition(":")
        number = int(version)
        try:
            async with asyncio.timeout(min(timeout, _MAX_WAIT_SECONDS)):
                await self._state.wait_until(lambda: self._state.has_reached(generation, number))
        except TimeoutError:
            pass

    def _label(self, send: Send) -> Send:
        begin = self._state.serving

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                end = self._state.serving
                message["headers"] = [
                    *message.get("headers", ()),
                    (HEADER_WEIGHTS.encode(), _key(end).encode()),
                    (HEADER_WEIGHTS_BEGIN.encode(), _key(begin).encode()),
                ]
            await send(message)

        return send_labelled


def _key(weights: Any) -> str:
    return weights.key if weights.generation else ""


async def _respond(send: Send, status: int, body: str, content_type: str = "text/plain; charset=utf-8") -> None:
    headers = [(b"content-type", content_type.encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
