"""HTTP requests to a model's server, with retries until the deadline of the execution.

Decides what a status means: 429 is waited for and is not a failure; 5xx, broken connections and, once the server has
answered, refusals of the key or the URL are retried with jitter; everything else is final. If the server also fails
the request that it answered last, it is away: what fails then, or gives up just after it is back, is `unreachable`, and
clients wait and send it again. Callers interpret the JSON. Invariant: no message contains the API key.

Each try, and each wait for the next one, is a span. Names follow OpenTelemetry's conventions for generative AI.
"""

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from rljob_api.tracing.spans import NOT_RECORDED, Attributes, Span, is_on, span
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.retry_after import parse_retry_after
from rljob_service.models.execution import ExecutionProgress, NoScoreError
from rljob_service.models.metrics import UpstreamMetrics, count_tokens
from rljob_service.models.rate_limiter import RateLimiter
from rljob_service.models.shared_engines import SharedEngines

Json = dict[str, Any]
"""A request or an answer."""
_OPERATIONS = {"/chat/completions": "chat", "/completions": "text_completion"}


FIRST_DELAY_SECONDS = 0.25
MAX_DELAY_SECONDS = 8.0
_CONNECT_SECONDS = 10.0
_MAX_SHOWN_CHARACTERS = 500
MAX_ANSWER_BYTES = 4 << 20
_RETRYABLE_STATUSES = {408, 409, 425, *range(500, 600)} - {501, 505}  # 501 and 505 are permanent
_UNAVAILABLE = 503
"""The status of an engine that sleeps, or that is about to."""
_REFUSING_STATUSES = {401, 404, 405}
"""Statuses of a wrong key, model or URL. Not 403, with which some endpoints refuse a single text."""
_AWAY_STATUSES = _REFUSING_STATUSES | {402}
"""They pass, if the server has answered before: an expired key, a route or a credit that is used up."""
_PROBE_SECONDS = 60.0
_MARGIN_SECONDS = 0.1
"""Before the end of an execution, in which its result must be reported."""


class _Response(NamedTuple):
    status: int
    text: str
    retry_after: str | None


class UpstreamClient:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        limiter: RateLimiter,
        metrics: UpstreamMetrics,
        *,
        name: str,
        secret: str = "",
        headers: Mapping[str, str] | None = None,
        on_refused: Callable[[str], None] = lambda answer: None,
        engines: SharedEngines | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """`on_refused` is called if the server refuses requests before it has ever answered one: the configuration is
        wrong. Later, the same answer is a failure of one request, because the configuration worked. `engines`: the
        servers whose path `url` is, instead of one server."""
        self._session = session
        self._url, self._engines = url, engines
        self._limiter, self._max_answer_bytes = limiter, max_answer_bytes
        self._metrics = metrics
        self._secret = secret
        self._headers = {**(headers or {}), **({"Authorization": f"Bearer {secret}"} if secret else {})}
        self._name = name
        self._on_refused = on_refused
        self._answered: Json | None = None
        """The payload that was answered last."""
        self._probe: asyncio.Task[None] | None = None
        self._is_away = False
        """Whether it fails what it answered before."""
        self._came_back_at = -math.inf

    def was_away(self, since: float) -> bool:
        """Whether it has been away at any time since `since`, of the monotonic clock: what failed after that may not be
        to blame, even if others are answered by now."""
        return self._is_away or self._came_back_at > since

    def _set_away(self, is_away: bool) -> None:
        if self._is_away and not is_away:
            self._came_back_at = time.monotonic()
        self._is_away = is_away

    def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()

    def suspect(self) -> None:
        """A request failed, or got no answer: find out whether the server still answers what it answered last. Engines
        of the trainer's Pods say themselves whether they are awake."""
        if self._engines is None and self._answered is not None and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._ask_again(self._answered))

    async def _ask_again(self, payload: Json) -> None:
        await self._limiter.acquire_retry()
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                response = await self._send(self._url, payload)
            self._metrics.record_request(str(response.status))
            self._set_away(response.status not in (200, 429))
            if response.status == 200:
                with contextlib.suppress(NoScoreError):  # it answers, whatever it says
                    self._read_answer(response.text)
        except (aiohttp.ClientError, OSError):  # a TimeoutError is an OSError
            self._metrics.record_request("connection")
            self._set_away(True)

    async def post(self, payload: Json, progress: ExecutionProgress) -> Json:
        """Return the JSON object of the answer. Raises NoScoreError, and AwayError if all engines are away."""
        num_tries = 0
        last = ""
        while True:
            if num_tries:
                await self._limiter.acquire_retry()
            num_tries += 1
            progress.activity = f"waiting for an answer of {self._name}{f' after {last}' if last else ''}"
            server = self._engines.pick() if self._engines else ""
            url = f"{server}{self._url}"
            try:
                with begin_try(url, payload, num_tries) as span:
                    response = await self._send(url, payload)
                    span.record_status(response.status)
                    if response.status == 200:
                        return self._accept(payload, response, span)
            except (aiohttp.ClientError, OSError) as error:  # includes timeouts of connecting
                self._metrics.record_request("connection")
                if self._engines:
                    self._engines.drop(server)
                    continue
                last = f"{type(error).__name__}: {self.show(str(error))}"
                await self._back_off(self._delay(num_tries), progress, InvalidReason.EXCEPTION, num_tries, last)
                continue
            self._metrics.record_request(str(response.status))
            last = f"{response.status} {self.show(response.text)}".strip()
            if self._engines and response.status == _UNAVAILABLE:
                self._engines.drop(server)
                continue
            await self._handle_error(response, progress, num_tries, last)

    def _accept(self, payload: Json, response: _Response, span: Span) -> Json:
        self._metrics.record_request(str(response.status))
        self._answered = payload
        self._set_away(False)
        answer = self._read_answer(response.text)
        record_answer(span, answer)
        return answer

    async def _send(self, url: str, payload: Json) -> _Response:
        async with self._session.post(
            url,
            json=payload,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS),
            allow_redirects=False,  # never send the key to another URL
        ) as response:
            text = await _read_text(response, self._max_answer_bytes)
            status = _find_error(text) if response.status == 200 else response.status
            return _Response(status, text, response.headers.get("Retry-After"))

    async def _handle_error(self, response: _Response, progress: ExecutionProgress, num_tries: int, last: str) -> None:
        """Wait before a retry. Raises NoScoreError if a retry cannot help or would be too late."""
        retry_after = parse_retry_after(response.retry_after)
        if response.status == 429:
            self._set_away(False)
            seconds = self._delay(num_tries) if retry_after is None else retry_after
            self._limiter.pause(seconds)
            # Requests that wait for the same moment are not sent all at once.
            wait = seconds + random.random() * FIRST_DELAY_SECONDS
            await self._back_off(wait, progress, InvalidReason.TIMEOUT, num_tries, last)
        elif response.status in _RETRYABLE_STATUSES or (self._answered and response.status in _AWAY_STATUSES):
            delay = max(retry_after or 0.0, self._delay(num_tries))
            await self._back_off(delay, progress, InvalidReason.EXCEPTION, num_tries, last)
        else:
            message = f"{self._name} answered {last}"
            if response.status in _REFUSING_STATUSES and not self._answered:
                self._on_refused(message)
            raise NoScoreError(InvalidReason.EXCEPTION, message)

    def show(self, text: str) -> str:
        """Return the beginning of a text from the server, without the key."""
        return self.hide_key(" ".join(text.split()))[:_MAX_SHOWN_CHARACTERS]

    def hide_key(self, text: str) -> str:
        """Remove the key, which some servers repeat. Pass the whole text: a truncated key is not found."""
        return text.replace(self._secret, "***") if self._secret else text

    def _delay(self, num_tries: int) -> float:
        return random.random() * min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0**num_tries)

    async def _back_off(
        self, seconds: float, progress: ExecutionProgress, reason: InvalidReason, num_tries: int, last: str
    ) -> None:
        if reason is InvalidReason.EXCEPTION:
            self.suspect()
            if self._answered is None:
                self._set_away(True)
        if seconds >= progress.seconds_left:
            if self._probe is not None:
                await asyncio.wait((self._probe,), timeout=max(0.0, progress.seconds_left - _MARGIN_SECONDS))
            if reason is InvalidReason.EXCEPTION and self.was_away(progress.started_at):
                reason = InvalidReason.UNREACHABLE
            tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
            more = f", next try in {seconds:.1f} s" if reason is InvalidReason.TIMEOUT else ""
            raise NoScoreError(reason, f"{self._name} failed within timeoutSeconds ({tries}{more}); last: {last}")
        progress.activity = f"waiting {seconds:.1f} s after {last}"
        # A status or the name of an error: the text that follows it is not recorded.
        reason_alone = last.split(maxsplit=1)[0].rstrip(":")
        with span("back off", {"rljob.seconds": seconds, "rljob.reason": reason_alone}):
            await asyncio.sleep(seconds)

    def _read_answer(self, text: str) -> Json:
        """Return the JSON object of an answer, and count its tokens."""
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            message = f"{self._name} did not return a JSON object: {self.show(text)}"
            raise NoScoreError(InvalidReason.BAD_RETURN, message)
        self._metrics.record_tokens(answer)
        return answer


def _find_error(text: str) -> int:
    """Return the status that an answer with the status 200 has in its body, as gateways of many models write the error
    of a model's server; 200 without an error."""
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
        status = int(json.loads(text)["error"]["code"])
        if 400 <= status < 600:
            return status
    return 200


async def _read_text(response: aiohttp.ClientResponse, max_bytes: int) -> str:
    """Return the body, truncated to the maximum size of an answer."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            break
    return body[:max_bytes].decode(errors="replace")


def begin_try(url: str, payload: Json, number: int) -> Span:
    """One request. `number`: from 1."""
    if not is_on():
        return NOT_RECORDED
    parts = urlsplit(url)
    operation = next((name for end, name in _OPERATIONS.items() if parts.path.endswith(end)), "classify")
    model = str(payload.get("model", ""))
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": payload.get("temperature"),
        "gen_ai.request.max_tokens": payload.get("max_tokens", payload.get("max_completion_tokens")),
        "server.address": parts.hostname or "",
        "server.port": parts.port,
        "http.request.resend_count": number - 1 if number > 1 else None,
    }
    return span(f"{operation} {model}".strip(), attributes, kind="client")


def record_answer(attempt: Span, answer: Json) -> None:
    """`answer`: JSON, whatever it says."""
    reported = answer.get("model")
    attempt.set(
        {
            "gen_ai.response.model": reported if isinstance(reported, str) else None,
            "gen_ai.usage.input_tokens": int(count_tokens(answer, "prompt")) or None,
            "gen_ai.usage.output_tokens": int(count_tokens(answer, "completion")) or None,
        }
    )
