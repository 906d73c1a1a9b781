"""The ASGI layer in front of every path of vLLM's server: the token, readiness, and the weights served.

Closed by default: every path except readiness and metrics needs the job's token, whether it exists or not. Serves READY
and ROLLOUT_WEIGHTS from the replica's state, which the weight puller owns.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac

from starlette.datastructures import QueryParams
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rljob_api.wire.contract import UrlPath
from rljob_trainer.rollout.puller import ReplicaState

_OPEN_PATHS = frozenset({UrlPath.READY, UrlPath.METRICS})
_GENERATION_PATHS = ("/v1/", "/inference/")
_WEBSOCKET_POLICY_VIOLATION = 1008


class RolloutMiddleware:
    """Wraps vLLM's app. Must be the outermost layer, so that no part of vLLM responds before it."""

    def __init__(self, app: ASGIApp, *, token: str, state: ReplicaState) -> None:
        if not token:
            raise ValueError("a rollout needs the job's token, got an empty string")
        self._app, self._state = app, state
        self._authorization = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif scope["path"] in _OPEN_PATHS or self._is_authorized(scope):
            if response := await self._respond(scope):
                await response(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _WEBSOCKET_POLICY_VIOLATION})
        else:
            text = "the job's token is required: Authorization: Bearer TOKEN"
            await PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._authorization)

    async def _respond(self, scope: Scope) -> Response | None:
        """Return the response to an authorized request; None if vLLM should respond."""
        state, path = self._state, scope["path"]
        if path == UrlPath.READY:
            reason = state.reason_not_ready()
            return PlainTextResponse(reason or "ready", 503 if reason else 200)
        if path == UrlPath.ROLLOUT_WEIGHTS:
            return await self._respond_weights(QueryParams(scope["query_string"]))
        if not state.serving.generation and path.startswith(_GENERATION_PATHS):
            reason = f"the engine's weights are undefined after a failed update: {state.error}"
            return PlainTextResponse(reason if state.is_broken else "the engine has loaded no weights yet", 503)
        return None

    async def _respond_weights(self, query: QueryParams) -> Response:
        """Respond with the weights served. With ?want=G:V, first wait until they are G:V, up to the timeout."""
        state = self._state
        if want := query.get("want"):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(query.get("timeout", "30"))):
                    await state.wait_until(lambda: state.serving.key == want)
        report = state.report("self")
        answer = state.serving.model_copy(update={"error": report.error}) if report else state.serving
        # A head of an earlier version does not know the error.
        return Response(
            answer.model_dump_json(exclude={"error"} if not answer.error else None), media_type="application/json"
        )
