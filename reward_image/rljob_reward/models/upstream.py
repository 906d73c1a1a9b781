"""One question to a model's server over HTTP: asked again while that may help, never beyond its deadline.

Owns what an answer of the server means: 429 waits and is no failure, 5xx and broken connections are tried again with
jitter, anything else is final. Leaves what the JSON says to the caller. Invariant: no message holds the key.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp

from rljob_api.wire.protocol import InvalidReason
from rljob_api.wire.retry_after import parse_retry_after
from rljob_reward.models.model_slots import NoScoreError, Progress

FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 8.0
_CONNECT_SECONDS = 10.0
_SHOWN_CHARACTERS = 500
_MAX_ANSWER_BYTES = 4 << 20
_AGAIN = {408, 409, 425, *range(500, 600)} - {501, 505}  # these two say that it cannot


class Meter(Protocol):
    """What an asker tells of its calls, and asks leave of for repeating one."""

    def record_call(self, outcome: str) -> None: ...

    def pause(self, seconds: float) -> None:
        """The server wants no request for so long."""
        ...

    async def enter_again(self) -> None:
        """Wait until one more request may be sent."""
        ...


class Asker:
    """Posts JSON to one server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        meter: Meter,
        *,
        secret: str = "",
        name: str = "the endpoint",
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._session = session
        self._url = url
        self._meter = meter
        self._secret = secret
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._name = name
        self._jitter = jitter

    async def post(self, payload: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """The answer's JSON object. Raises NoScoreError."""
        num_tries = 0
        last = ""
        while True:
            if num_tries:
                await self._meter.enter_again()
            num_tries += 1
            progress.now = f"waiting for {self._name}'s answer{f' after {last}' if last else ''}"
            try:
                async with self._session.post(
                    self._url,
                    json=payload,
                    headers=self._headers,
                    timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS),
                    allow_redirects=False,  # the key goes nowhere else
                ) as response:
                    status, text = response.status, await _read_text(response)
                    retry_after = response.headers.get("Retry-After")
            except (aiohttp.ClientError, OSError) as error:  # the time-out of connecting is one of them
                self._meter.record_call("connection")
                last = f"{type(error).__name__}: {self.show(str(error))}"
                await self._pause(self._delay(num_tries), progress, InvalidReason.EXCEPTION, num_tries, last)
                continue
            self._meter.record_call(str(status))
            if status == 200:
                return self._read(text)
            last = f"{status} {self.show(text)}".strip()
            if status == 429:
                seconds = parse_retry_after(retry_after)
                seconds = self._delay(num_tries) if seconds is None else seconds
                self._meter.pause(seconds)
                # Not all that wait for the same moment should come back in it.
                wait = seconds + self._jitter() * FIRST_DELAY_SECONDS
                await self._pause(wait, progress, InvalidReason.TIMEOUT, num_tries, last)
            elif status in _AGAIN:
                delay = max(parse_retry_after(retry_after) or 0.0, self._delay(num_tries))
                await self._pause(delay, progress, InvalidReason.EXCEPTION, num_tries, last)
            else:
                raise NoScoreError(InvalidReason.EXCEPTION, f"{self._name} answered {last}")

    def show(self, text: str) -> str:
        """A text of the server's for people: its beginning, without the key."""
        return self.hide_key(" ".join(text.split()))[:_SHOWN_CHARACTERS]

    def hide_key(self, text: str) -> str:
        """`text` without the key, which some servers repeat. For a whole text: a part of the key is not found."""
        return text.replace(self._secret, "***") if self._secret else text

    def _delay(self, num_tries: int) -> float:
        """Full jitter under a bound that doubles."""
        return self._jitter() * min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0**num_tries)

    async def _pause(self, seconds: float, progress: Progress, reason: InvalidReason, tries: int, last: str) -> None:
        if seconds >= progress.seconds_left:
            times = "once" if tries == 1 else f"{tries} times"
            more = f", and the next try would be {seconds:.1f} s later" if reason is InvalidReason.TIMEOUT else ""
            raise NoScoreError(reason, f"{self._name} was asked {times} within timeoutSeconds{more}; at last: {last}")
        progress.now = f"waiting {seconds:.1f} s after {last}"
        await asyncio.sleep(seconds)

    def _read(self, text: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise NoScoreError(InvalidReason.BAD_RETURN, f"{self._name} answered no JSON object: {self.show(text)}")
        return answer


async def _read_text(response: aiohttp.ClientResponse) -> str:
    """The body, cut off where it is longer than any answer."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MAX_ANSWER_BYTES:
            break
    return body[:_MAX_ANSWER_BYTES].decode(errors="replace")
