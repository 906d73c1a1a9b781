"""One call of a function, or one episode, and its response, for services.requests. Pure.

Invariant: a response becomes one result, or an invalid result with a reason if it breaks the protocol.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass

from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.calls import CallRequest, CallResult
from rljob_api.wire.contract import (
    MAX_EPISODE_REPLY_BYTES,
    MAX_TOOL_RESULT_CHARACTERS,
    MAX_USER_REPLY_BYTES,
    UrlPath,
)
from rljob_api.wire.scores import Part
from rljob_trainer.agents.base import EpisodeMessage

_MAX_BYTES_PER_CHARACTER = 12
"""A character outside the basic plane is two escapes, \\uXXXX\\uXXXX, in JSON that is ASCII."""
_MAX_VALUE_BYTES = max(
    MAX_USER_REPLY_BYTES, MAX_EPISODE_REPLY_BYTES, _MAX_BYTES_PER_CHARACTER * MAX_TOOL_RESULT_CHARACTERS
)
_MAX_RESPONSE_BYTES = _MAX_VALUE_BYTES + (64 << 10)
"""A value with the other fields of its result."""


@dataclass(frozen=True)
class FunctionCall:
    """A call of the simulated user or a tool: a request to /v1/call, as services.messages.Call describes it. Retries
    send the same one, with the same id."""

    request: CallRequest | EpisodeMessage
    num_results = 1
    path = UrlPath.CALL.value
    max_response_bytes = _MAX_RESPONSE_BYTES
    is_short = False

    @property
    def lane(self) -> Lane:
        return self.request.lane

    def encode(self, reads: Collection[Part] = ()) -> bytes:
        """Return the body. Raise ValueError for arguments without a JSON form, such as NaN or too deep a nesting."""
        assert isinstance(self.request, CallRequest)
        return _encode(self.request)

    def end(self) -> None:
        """A retry is the same call."""

    def read(self, text: str, seconds: float) -> list[CallResult]:
        try:
            result = CallResult.model_validate_json(text, extra="ignore")
            if result.id != self.request.id:
                raise ValueError(f"it is for {result.id}")
            if result.valid != (result.reason is None):
                raise ValueError("a result must be valid without a reason, or invalid with one")
        except (ValueError, RecursionError) as error:
            return self.fail(InvalidReason.BAD_RETURN, f"invalid response {text[:200]}: {error}", seconds)
        return [result]

    def fail(self, reason: InvalidReason, message: str, seconds: float = 0.0) -> list[CallResult]:
        failed = CallResult(
            id=self.request.id, valid=False, reason=reason, message=message[:2000], execute_seconds=seconds
        )
        return [failed]


@dataclass(frozen=True)
class EpisodeRequest(FunctionCall):
    """An episode. Retries have the same id and another attempt."""

    request: EpisodeMessage

    def encode(self, reads: Collection[Part] = ()) -> bytes:
        """Begin an attempt, and return its body. Raise ValueError for a row without a JSON form."""
        return _encode(self.request.next_attempt())

    def end(self) -> None:
        self.request.end_attempt()


def _encode(request: CallRequest) -> bytes:
    try:
        text = json.dumps(request.model_dump(), ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return text.encode("utf-8", "replace")
