"""The ASGI layer in front of every path of vLLM's server: the token, readiness, and the weights served.

Closed by default: every path except probes and metrics needs the job's token, whether it exists or not. Serves READY
and ROLLOUT_WEIGHTS from the replica's state, which the weight puller owns; ROLLOUT_SLEEP and ROLLOUT_WAKE by the naps
of a replica in a trainer Pod. Invariant: what it says about health is the engine's word, not the API server's.
"""

import asyncio
import contextlib
import hmac
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.datastructures import QueryParams
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rljob_api.wire.contract import UrlPath
from rljob_api.wire.weights import EngineMemory, parse_key
from rljob_trainer.rollout.engine_watch import EngineWatch
from rljob_trainer.rollout.naps import ModelNaps, Naps, NotWarmError
from rljob_trainer.rollout.puller import ReplicaState

logger = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({UrlPath.READY, UrlPath.LIVE, UrlPath.METRICS})
_VLLM_HEALTH = "/health"
_GENERATION_PATHS = ("/v1/", "/inference/")
_ANSWER_SECONDS = 8.0
"""For which a request for the weights waits for the engine: its client waits 10 s longer than for the weights."""
_WEBSOCKET_POLICY_VIOLATION = 1008


class ClosedMiddleware(ABC):
    """Wraps vLLM's app. Must be the outermost layer, so that no part of vLLM responds before it."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        if not token:
            raise ValueError("a rollout needs the job's token, got an empty string")
        self._app, self._authorization = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["path"] in _OPEN_PATHS or hmac.compare_digest(given, self._authorization):
            if response := await self._respond(scope):
                await response(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _WEBSOCKET_POLICY_VIOLATION})
        else:
            text = "the job's token is required: Authorization: Bearer TOKEN"
            await PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    @abstractmethod
    async def _respond(self, scope: Scope) -> Response | None:
        """Return the response to an authorized request; None if vLLM should respond."""


async def change_turn(scope: Scope, change: Callable[[], Awaitable[EngineMemory]]) -> Response:
    """Respond with what the engine holds after it fell asleep or woke up. 409 while it warms up: ask again."""
    if scope["method"] != "POST":
        return PlainTextResponse("send a POST request", 405, {"Allow": "POST"})
    try:
        memory = await change()
    except NotWarmError as error:
        return PlainTextResponse(str(error), 409)
    except Exception as error:
        logger.exception("%s failed", scope["path"])
        return PlainTextResponse(f"{type(error).__name__}: {error}", 500)
    return Response(memory.model_dump_json(), media_type="application/json")


class ModelMiddleware(ClosedMiddleware):
    """The middleware of an engine that serves a model of its own in a trainer Pod."""

    def __init__(self, app: ASGIApp, *, token: str, naps: ModelNaps, watch: EngineWatch) -> None:
        super().__init__(app, token=token)
        self._naps, self._watch = naps, watch

    async def _respond(self, scope: Scope) -> Response | None:
        path, reason = scope["path"], self._naps.reason_not_ready() or self._watch.reason_silent()
        if path == UrlPath.ROLLOUT_SLEEP:
            return await change_turn(scope, self._naps.sleep)
        if path == UrlPath.ROLLOUT_WAKE:
            return await change_turn(scope, self._naps.wake)
        if path == UrlPath.READY:
            return PlainTextResponse(reason or "ready", 503 if reason else 200)
        return PlainTextResponse(reason, 503) if reason and path != UrlPath.METRICS else None


class RolloutMiddleware(ClosedMiddleware):
    """The middleware of a rollout."""

    def __init__(
        self, app: ASGIApp, *, token: str, state: ReplicaState, watch: EngineWatch, naps: Naps | None = None
    ) -> None:
        """`naps`: of a replica in a trainer Pod; others refuse to sleep."""
        super().__init__(app, token=token)
        self._state, self._watch, self._naps = state, watch, naps

    async def _respond(self, scope: Scope) -> Response | None:
        state, path = self._state, scope["path"]
        if path == UrlPath.READY:
            reason = state.reason_not_ready() or self._watch.reason_silent()
            return PlainTextResponse(reason or "ready", 503 if reason else 200)
        if path == UrlPath.LIVE:  # that this is answered shows that this process runs: it ends if the engine hangs
            return PlainTextResponse("alive")
        if path == _VLLM_HEALTH and (reason := self._watch.reason_silent()):
            return PlainTextResponse(reason, 503)
        if path == UrlPath.ROLLOUT_WEIGHTS:
            return await self._respond_weights(QueryParams(scope["query_string"]))
        if path in (UrlPath.ROLLOUT_SLEEP, UrlPath.ROLLOUT_WAKE):
            return await self._respond_turn(scope)
        if state.is_asleep and path.startswith(_GENERATION_PATHS):
            return PlainTextResponse(state.reason_not_ready(), 503)
        if not state.serving.generation and path.startswith(_GENERATION_PATHS):
            reason = f"the engine's weights are undefined after a failed update: {state.error}"
            return PlainTextResponse(reason if state.is_broken else "the engine has loaded no weights yet", 503)
        return None

    async def _respond_turn(self, scope: Scope) -> Response:
        if self._naps is None:
            return PlainTextResponse("this replica shares no devices with a trainer", 404)
        if scope["path"] == UrlPath.ROLLOUT_SLEEP:
            return await change_turn(scope, self._naps.sleep)
        try:
            generation, version = parse_key(QueryParams(scope["query_string"]).get("want", ""))
        except ValueError as error:
            return PlainTextResponse(str(error), 400)
        return await change_turn(scope, partial(self._naps.wake, generation, version))

    async def _respond_weights(self, query: QueryParams) -> Response:
        """Respond with the weights served. With ?want=G:V, first wait until they are G:V, up to the timeout. 503 if the
        engine does not answer."""
        state = self._state
        if want := query.get("want"):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(query.get("timeout", "30"))):
                    await state.wait_until(lambda: state.serving.key == want)
        if state.is_warm and (reason := await self._watch.check(_ANSWER_SECONDS)):
            return PlainTextResponse(reason, 503)
        report = state.report("self")
        answer = state.serving.model_copy(update={"error": report.error}) if report else state.serving
        return Response(answer.model_dump_json(), media_type="application/json")
