"""The gateway's HTTP server: routes, keys, bodies, streams, and errors in each API's own form.

    POST /v1/chat/completions | /v1/completions | /v1/responses | /v1/messages     an answer of the policy
    POST /v1/rewards                                                               see rewards.py
    POST /v1/messages/count_tokens | /v1/responses/input_tokens                    no turn
    GET  /v1/models
    the paths of answers, for another model                                        see forwarding.py

Leaves what an episode may do and what is recorded to episodes.py, and the formats to dialects/. A stream sends its
status as late as it can: until KEEP_ALIVE_SECONDS an error is an HTTP status, after that an event. Invariant: each
request gets an answer or an error, or its client leaves.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.manifest.agent import Agent
from rljob_api.wire.contract import HEADER_SESSION, PORT_GATEWAY
from rljob_api.wire.discovery import listening_port
from rljob_trainer.agents.base import EpisodeTask, OpenEpisode
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.gateway.attempt import Attempt, Policy
from rljob_trainer.gateway.dialects.chat import ChatCompletions
from rljob_trainer.gateway.dialects.completions import Completions
from rljob_trainer.gateway.dialects.meaning import Rules
from rljob_trainer.gateway.dialects.messages import Messages
from rljob_trainer.gateway.dialects.responses import Responses
from rljob_trainer.gateway.episodes import POLICY, Attempts, Episodes, Seats, TrajectoryName
from rljob_trainer.gateway.exchanges import RETRY_SECONDS, Exchange, Sampled
from rljob_trainer.gateway.forwarding import OtherModels
from rljob_trainer.gateway.rewards import read_posted
from rljob_trainer.gateway.types import Dialect, ModelRequest, RequestError
from rljob_trainer.outages import Dependency

log = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Completions(), Responses(), Messages())
KEEP_ALIVE_SECONDS = 10.0
MAX_BODY_BYTES = 32 * 2**20
_BACKLOG = 4096
"""Connections that wait to be accepted: a step may start thousands of programs at once."""
_NUM_THREADS = 2
"""One long conversation then delays only a part of the others."""
_RETRY_HEADER = "x-stainless-retry-count"
_CLIENT_LEFT = 499
_NO_RETRY = {"x-should-retry": "false"}
"""For the SDKs of OpenAI and Anthropic, which otherwise retry some of the errors."""


@dataclass(frozen=True)
class TurnTimes:
    """The gateway's own part of a turn, in seconds."""

    to_engine: float
    """From the request's headers until the engine gets it."""
    to_client: float
    """From the engine's answer until the response is written."""


class ModelGateway:
    """Implements agents.base.Gateway."""

    def __init__(
        self,
        agent: Agent,
        template: ChatTemplate,
        context_length: int | None,
        *,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        api_keys: Mapping[str, str] | None = None,
        health: Mapping[str, Dependency] | None = None,
        on_response: Callable[[str, str, int], None] = lambda api, model, status: None,
        on_turn: Callable[[TurnTimes], None] = lambda times: None,
    ) -> None:
        """`context_length`: the longest prompt with its answer, in tokens; None: not known. `api_keys`: of the models
        of agent.models, by name. `health`: see OtherModels. `on_response`: called with the path of each response
        without /v1/, such as chat/completions, the model, and the status; 499: the client left. `on_turn`: called for
        each answer, once per sample."""
        self._on_response, self._on_turn = on_response, on_turn
        self._keep_alive_seconds = keep_alive_seconds
        self._rules = Rules(agent.constraints == "ignore", template.arguments, template.has_variable)
        self._others = OtherModels(agent.models, api_keys or {}, health)
        self._seats = Seats(agent.seats, are_open=agent.type == "environment")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="gateway")
        self._episodes = Episodes(Policy(template, self._threads, agent.turn_limit, context_length, retry_seconds))
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._count, _write_missing_route])
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, self._serve(dialect, self._answer))
        openai = DIALECTS[0]
        app.router.add_post("/v1/rewards", self._serve(openai, self._reward))
        for dialect, name in zip(DIALECTS[-2:], ("input_tokens", "count_tokens"), strict=True):
            app.router.add_post(f"{dialect.path}/{name}", self._serve(dialect, self._count_tokens))
        app.router.add_get("/v1/models", self._serve(openai, self._list_models))
        app.router.add_get("/v1/models/{model:.+}", self._serve(openai, self._get_model))
        # A client that leaves cancels its handler, which learns of it in no other way.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    async def start(self, address: str, port: int | None = None) -> None:
        """Listen at the port of gateways, or at `port`; 0 chooses one. Raise UserError if the port is in use."""
        port = listening_port(PORT_GATEWAY) if port is None else port
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, address, port, backlog=_BACKLOG).start()
        except OSError as error:
            await self.close()
            raise UserError(
                f"cannot listen on {address}:{port} (model gateway): {error.strerror}; stop the process that holds the "
                "port"
            ) from error
        host, bound = self._runner.addresses[0][:2]
        self._episodes.url = f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"

    async def close(self) -> None:
        """Stop listening. Requests in flight are refused, and episodes end."""
        self._episodes.close()
        await self._runner.cleanup()
        await self._others.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def url(self) -> str:
        """Without a path, such as http://10.0.0.7:8300. Known once it listens."""
        return self._episodes.url

    def open(self, task: EpisodeTask) -> OpenEpisode:
        """Let a program play the episode until the episode's `close`."""
        return self._episodes.open(task)

    def statistics(self) -> dict[str, float]:
        """Return the current value of each metric `rljob_gateway_NAME`."""
        since = self._find_oldest()
        return {
            "episodes": len(self._episodes),
            "in_flight": sum(attempt.exchanges.num_waiting for attempt in self._episodes.attempts()),
            "oldest_seconds": 0.0 if since is None else time.monotonic() - since,
        }

    def describe_wait(self) -> str:
        """Return `3 completions for programs, oldest 4.1 s`; empty if none is in flight."""
        values = self.statistics()
        count = int(values["in_flight"])
        what = "completions for programs" if count > 1 else "completion for a program"
        return f"{count} {what}, oldest {values['oldest_seconds']:.1f} s" if count else ""

    def _find_oldest(self) -> float | None:
        waiting = (attempt.exchanges.waiting_since for attempt in self._episodes.attempts())
        return min((since for since in waiting if since is not None), default=None)

    def _serve(self, dialect: Dialect, answer: _Answer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that checks the key and the body, and writes errors in the form of `dialect`."""

        async def handle(request: web.Request) -> web.StreamResponse:
            attempts: Attempts | None = None
            try:
                attempts = self._episodes.find(_read_key(request))
                return await answer(dialect, request, attempts)
            except RequestError as error:
                if attempts is not None:
                    attempts.main.record_refusal(error)
                return _refuse(dialect, error)
            except ConnectionError:  # the client left while it got the answer
                raise asyncio.CancelledError from None
            except Exception:
                log.exception("the gateway failed to answer %s", request.path)
                return _refuse(dialect, RequestError(500, "internal_error", "see the log of the job's driver"))

        return handle

    async def _answer(self, dialect: Dialect, request: web.Request, attempts: Attempts) -> web.StreamResponse:
        started_at = time.monotonic()
        body, data = await _read_body(request)
        if body.get("model") in self._others.names:
            return await self._forward(request, body, attempts.main)
        asked = self._read(dialect, body, request)
        attempt = attempts.choose(self._name_trajectory(asked.model, request))
        attempt.ignored.update(dict.fromkeys(asked.ignored))
        digest = hashlib.sha256(request.path.encode() + b"\n" + data).digest()
        is_retry = request.headers.get(_RETRY_HEADER, "0") != "0"
        exchange = attempt.join(asked, digest, len(data), is_retry=is_retry)
        is_first = exchange.started_at >= started_at
        try:
            if asked.stream:
                response, sampled = await self._stream(dialect, request, attempt, exchange, asked)
            else:
                await exchange.wait()
                sampled = await attempt.exchanges.take(exchange)
                response = _respond(dialect.write(asked, sampled.answer), headers=_describe(asked, sampled))
                await response.prepare(request)
                await response.write_eof()
            exchange.is_delivered = True
        finally:
            attempt.exchanges.leave(exchange)
        if is_first and sampled is not None:
            to_client = time.monotonic() - sampled.answered_at
            self._on_turn(TurnTimes(sampled.asked_at - started_at, to_client))
        return response

    async def _forward(self, request: web.Request, body: Mapping[str, Any], attempt: Attempt) -> web.StreamResponse:
        request[_MODEL_OF_REQUEST] = body["model"]
        response, refusal = await self._others.forward(request, body)
        if refusal:
            attempt.record_refusal(RequestError(response.status, "model_refused", refusal))
        return response

    def _read(self, dialect: Dialect, body: Mapping[str, Any], request: web.Request) -> ModelRequest:
        asked = self._rules.read(dialect, body, request.headers)
        self._check_model(asked.model)
        return asked

    def _check_model(self, name: str) -> None:
        if self._seats.read(name) is None:
            others = "".join(f", {other}" for other in self._others.names)
            known = self._seats.describe()
            message = f"model: {name!r:.80} not found; the models are {known}{others}; see agent.models"
            raise RequestError(404, "model_not_found", message)

    def _name_trajectory(self, model: str, request: web.Request) -> TrajectoryName:
        """Return the trajectory of a request for the policy. Without a seat, all sessions belong to one trajectory."""
        seat = self._seats.read(model)
        return TrajectoryName(seat, request.headers.get(HEADER_SESSION, "")) if seat else TrajectoryName()

    async def _stream(
        self, dialect: Dialect, request: web.Request, attempt: Attempt, exchange: Exchange, asked: ModelRequest
    ) -> tuple[web.StreamResponse, Sampled | None]:
        """Return the response and the answer; None if the stream ended with an error."""
        response = web.StreamResponse(headers=_EVENT_STREAM)
        if await exchange.wait(self._keep_alive_seconds):
            sampled = await attempt.exchanges.take(exchange)
            events = dialect.events(asked, sampled.answer)
            response.headers.update(_describe(asked, sampled))
            await response.prepare(request)
        else:
            await response.prepare(request)
            await response.write(dialect.keep_alive)
            while not await exchange.wait(self._keep_alive_seconds):
                await response.write(dialect.keep_alive)
            try:
                sampled = await attempt.exchanges.take(exchange)
                events = dialect.events(asked, sampled.answer)
            except RequestError as error:
                attempt.record_refusal(error)
                sampled, events = None, [dialect.error_event(error.status, error.code, error.message)]
        await response.write(b"".join(events))
        await response.write_eof()
        return response, sampled

    async def _reward(self, dialect: Dialect, request: web.Request, attempts: Attempts) -> web.StreamResponse:
        body, _ = await _read_body(request)
        posted = read_posted(body)
        if posted is not None:
            attempts.find(TrajectoryName(posted.seat, request.headers.get(HEADER_SESSION, ""))).post_reward(posted)
        return _respond({"object": "reward"})

    async def _count_tokens(self, dialect: Dialect, request: web.Request, attempts: Attempts) -> web.StreamResponse:
        body, _ = await _read_body(request)
        if body.get("model") in self._others.names:
            return await self._forward(request, body, attempts.main)
        asked = self._read(dialect, body, request)
        attempt = attempts.choose(self._name_trajectory(asked.model, request))
        return _respond({"object": "response.input_tokens", "input_tokens": await attempt.count_tokens(asked)})

    async def _list_models(self, dialect: Dialect, request: web.Request, attempts: Attempts) -> web.StreamResponse:
        names = (*self._seats.models(), *self._others.names)
        return _respond({"object": "list", "data": [_describe_model(name) for name in names], "has_more": False})

    async def _get_model(self, dialect: Dialect, request: web.Request, attempts: Attempts) -> web.StreamResponse:
        name = request.match_info["model"]
        if name not in self._others.names:
            self._check_model(name)
        return _respond(_describe_model(name))

    @web.middleware
    async def _count(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        resource, status = request.match_info.route.resource, _CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
        finally:
            api = resource.canonical.removeprefix("/v1/") if resource else "unknown"
            self._on_response(api, request.get(_MODEL_OF_REQUEST, POLICY), status)
        return response


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Answer = Callable[[Dialect, web.Request, Attempts], Awaitable[web.StreamResponse]]
_EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # of proxies
}
_MODEL_OF_REQUEST = web.RequestKey("model", str)

_NO_COMPACTION = "; the gateway keeps no conversations, and compacts none: ask the model for a summary"


@web.middleware
async def _write_missing_route(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status not in (404, 405):
            raise
        paths = ", ".join([*(dialect.path for dialect in DIALECTS), "/v1/rewards", "/v1/models"])
        reason = _NO_COMPACTION if request.path.endswith("/compact") else ""
        message = f"{request.method} {request.path} not found{reason}; the paths are {paths}"
        return _refuse(DIALECTS[0], RequestError(error.status, "not_found", message))


def _describe_model(name: str) -> dict[str, Any]:
    """Return fields of both APIs."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "rljob", "type": "model", "display_name": name}


def _read_key(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _read_body(request: web.Request) -> tuple[Mapping[str, Any], bytes]:
    """Return the JSON object of the body, and its bytes."""
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        message = f"the body must have at most {MAX_BODY_BYTES} bytes; shorten the conversation"
        raise RequestError(413, "request_too_large", message) from error
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        message = f"the body is not JSON, or has too many levels: {error}; send a JSON object"
        raise RequestError(400, "invalid_json", message) from error
    if not isinstance(body, dict):
        raise RequestError(400, "invalid_json", "the body must be a JSON object")
    return body, data


def _describe(asked: ModelRequest, sampled: Sampled) -> dict[str, str]:
    """Return the headers of an answer."""
    headers = {"x-request-id": sampled.answer.id}
    if asked.ignored:
        names = ", ".join(asked.ignored)[:1000]
        headers["x-rljob-ignored"] = names.encode("ascii", "backslashreplace").decode().translate(_NO_CONTROL)
    return headers


_NO_CONTROL = dict.fromkeys([*range(32), 127], "?")
"""Characters of names that a program chose, for a header."""


def _respond(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    # ASCII: texts may have halves of surrogate pairs.
    return web.Response(text=json.dumps(body), status=status, headers=headers, content_type="application/json")


def _refuse(dialect: Dialect, error: RequestError) -> web.Response:
    headers = None if error.may_retry else _NO_RETRY
    return _respond(dialect.error(error.status, error.code, error.message), error.status, headers)
