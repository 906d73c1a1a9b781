"""HTTP requests to a model's server, with retries until the deadline of the execution.

Decides what a status means: 429 is waited for and is not a failure; 5xx and broken connections are retried with jitter;
everything else is final. Callers interpret the JSON. Invariant: no message contains the API key.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp

from rljob_api.wire.protocol import InvalidReason
from rljob_api.wire.retry_after import parse_retry_after
from rljob_reward.models.execution import ExecutionProgress, NoScoreError
from rljob_reward.models.metrics import UpstreamMetrics
from rljob_reward.models.rate_limiter import RateLimiter

FIRST_DELAY_SECONDS = 0.25
MAX_DELAY_SECONDS = 8.0
_CONNECT_SECONDS = 10.0
_MAX_SHOWN_CHARACTERS = 500
_MAX_ANSWER_BYTES = 4 << 20
_RETRYABLE_STATUSES = {408, 409, 425, *range(500, 600)} - {501, 505}  # 501 and 505 are permanent
_REFUSING_STATUSES = {401, 404, 405}
"""Of a wrong key, model or URL. Not 403, with which some endpoints refuse a single text."""


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
        on_refused: Callable[[str], None] = lambda answer: None,
    ) -> None:
        """`on_refused` is called if the server refuses requests before it has ever answered one: the configuration is
        wrong. Later, the same answer is a failure of one request, because the configuration worked."""
        self._session = session
        self._url = url
        self._limiter = limiter
        self._metrics = metrics
        self._secret = secret
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._name = name
        self._on_refused = on_refused
        self._has_answered = False

    async def post(self, payload: dict[str, Any], progress: ExecutionProgress) -> dict[str, Any]:
        """Return the JSON object of the answer. Raises NoScoreError."""
        num_tries = 0
        last = ""
        while True:
            if num_tries:
                await self._limiter.acquire_retry()
            num_tries += 1
            progress.activity = f"waiting for an answer of {self._name}{f' after {last}' if last else ''}"
            try:
                response = await self._send(payload)
            except (aiohttp.ClientError, OSError) as error:  # includes timeouts of connecting
                self._metrics.record_request("connection")
                last = f"{type(error).__name__}: {self.show(str(error))}"
                await self._back_off(self._delay(num_tries), progress, InvalidReason.EXCEPTION, num_tries, last)
                continue
            self._metrics.record_request(str(response.status))
            if response.status == 200:
                self._has_answered = True
                return self._parse(response.text)
            last = f"{response.status} {self.show(response.text)}".strip()
            await self._handle_error(response, progress, num_tries, last)

    async def _send(self, payload: dict[str, Any]) -> _Response:
        async with self._session.post(
            self._url,
            json=payload,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS),
            allow_redirects=False,  # never send the key to another URL
        ) as response:
            return _Response(response.status, await _read_text(response), response.headers.get("Retry-After"))

    async def _handle_error(self, response: _Response, progress: ExecutionProgress, num_tries: int, last: str) -> None:
        """Wait before a retry. Raises NoScoreError if a retry cannot help or would be too late."""
        retry_after = parse_retry_after(response.retry_after)
        if response.status == 429:
            seconds = self._delay(num_tries) if retry_after is None else retry_after
            self._limiter.pause(seconds)
            # Requests that wait for the same moment are not sent all at once.
            wait = seconds + random.random() * FIRST_DELAY_SECONDS
            await self._back_off(wait, progress, InvalidReason.TIMEOUT, num_tries, last)
        elif response.status in _RETRYABLE_STATUSES:
            delay = max(retry_after or 0.0, self._delay(num_tries))
            await self._back_off(delay, progress, InvalidReason.EXCEPTION, num_tries, last)
        else:
            message = f"{self._name} answered {last}"
            if response.status in _REFUSING_STATUSES and not self._has_answered:
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
        if seconds >= progress.seconds_left:
            tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
            more = f", next try in {seconds:.1f} s" if reason is InvalidReason.TIMEOUT else ""
            raise NoScoreError(reason, f"{self._name} failed within timeoutSeconds ({tries}{more}); last: {last}")
        progress.activity = f"waiting {seconds:.1f} s after {last}"
        await asyncio.sleep(seconds)

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            message = f"{self._name} did not return a JSON object: {self.show(text)}"
            raise NoScoreError(InvalidReason.BAD_RETURN, message)
        return answer


async def _read_text(response: aiohttp.ClientResponse) -> str:
    """Return the body, truncated to the maximum size of an answer."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MAX_ANSWER_BYTES:
            break
    return body[:_MAX_ANSWER_BYTES].decode(errors="replace")
