"""The policy as adapters call it: OpenAI's chat completions of the gateway, over one connection. Standard library only.

A request that failed on its way is sent again with the header of the official clients, by which the gateway returns
the answer that it has sampled already. A delivered answer is never requested again.
"""

import http.client
import json
import random
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljob_service.worker.environments.base import Answer, RefusedError
from rljob_service.worker.episodes.types import Access, Message

TURN_LIMIT = "turn_limit"
CONTEXT_LIMIT = "context_length_exceeded"
GONE = "gone"
"""Code of a 410 without another one: a later attempt has superseded this one, or the episode has ended."""

_RETRY_HEADER = "x-stainless-retry-count"
_RETRIED = frozenset((408, 409, 429, 500, 502, 503, 504))
_MAX_RETRIES = 4
_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 30.0
_CODES = {401: "unauthorized", 404: "not_found", 410: GONE}


class GatewayError(OSError):
    """The gateway cannot be reached, or does not answer as it must, after all retries."""


class ChatModel:
    """Implements base.Model. One thread at a time."""

    def __init__(
        self, access: Access, timeout_seconds: float | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`timeout_seconds`: of one answer; a weight update, or a full engine, makes it wait. None: no limit."""
        url = urllib.parse.urlsplit(access.base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.netloc, timeout=timeout_seconds)
        self._path = f"{url.path}/chat/completions"
        self.access = access
        """For frameworks that bring a client."""
        self._sleep = sleep

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Answer:
        """Return the next answer. `tools`: the fields of a ToolSchema each. `max_tokens`: a limit besides the job's.

        Raise RefusedError if the gateway refuses the request, GatewayError if it does not answer.
        """
        body: dict[str, Any] = {"model": self.access.name, "messages": list(messages)}
        if tools:
            body["tools"] = [{"type": "function", "function": dict(tool)} for tool in tools]
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        return _read(self._post(json.dumps(body).encode()))

    def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes) -> bytes:
        problem = ""
        for attempt in range(_MAX_RETRIES + 1):
            pause = min(_FIRST_PAUSE_SECONDS * 2**attempt, _MAX_PAUSE_SECONDS) * (0.5 + random.random() / 2)
            try:
                status, asked_pause, content = self._exchange(body, attempt)
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()  # the next request opens it again
                problem = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    return content
                code, message = _read_error(status, content)
                if status not in _RETRIED:
                    raise RefusedError(code, message)
                problem = f"HTTP {status}: {message}"
                pause = asked_pause if asked_pause is not None else pause
            if attempt < _MAX_RETRIES:
                self._sleep(pause)
        raise GatewayError(f"{self.access.base_url} does not answer: {problem} ({_MAX_RETRIES + 1} requests)")

    def _exchange(self, body: bytes, attempt: int) -> tuple[int, float | None, bytes]:
        """Return status, seconds of Retry-After, and the body."""
        headers = {"Authorization": f"Bearer {self.access.api_key}", "Content-Type": "application/json"}
        self._connection.request("POST", self._path, body, headers | {_RETRY_HEADER: str(attempt)})
        response = self._connection.getresponse()
        after = response.headers.get("retry-after", "")
        pause = min(float(after), _MAX_PAUSE_SECONDS) if after.isdecimal() else None
        return response.status, pause, response.read()


def is_limit(error: RefusedError) -> bool:
    """Whether the episode ends here because of its limits, and is valid."""
    return error.code in (TURN_LIMIT, CONTEXT_LIMIT)


def text_of(message: Message) -> str:
    """Return the content of a message as text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


def _read(content: bytes) -> Answer:
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        return Answer(body["id"], choice["message"], choice.get("finish_reason") or "stop")
    except (ValueError, LookupError, TypeError) as error:
        raise GatewayError(f"not an answer of chat completions: {type(error).__name__}: {error}") from None


def _read_error(status: int, content: bytes) -> tuple[str, str]:
    """Return code and message of an error in OpenAI's format, or of any other body."""
    try:
        error = json.loads(content)["error"]
        code, message = error.get("code"), error["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        code, message = None, content[:500].decode(errors="replace") or "without a body"
    return str(code or _CODES.get(status, f"http_{status}")), str(message)
