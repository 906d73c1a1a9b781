"""One call of a function and its response, for the rewards' transport. Pure.

Invariant: a response becomes one result, or an invalid result with a reason if it breaks the protocol.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from rljob_api.wire.contract import MAX_TOOL_RESULT_CHARACTERS, MAX_USER_REPLY_BYTES, UrlPath
from rljob_api.wire.protocol import CallRequest, CallResult, InvalidReason, Lane

_MAX_BYTES_PER_CHARACTER = 12
"""A character outside the basic plane is two escapes, \\uXXXX\\uXXXX, in JSON that is ASCII."""
_MAX_RESPONSE_BYTES = max(MAX_USER_REPLY_BYTES, _MAX_BYTES_PER_CHARACTER * MAX_TOOL_RESULT_CHARACTERS) + (64 << 10)
"""A value with the other fields of its result."""


@dataclass(frozen=True)
class FunctionCall:
    """A call as rewards.messages.Call describes it. Retries send the same one, with the same id."""

    request: CallRequest

    @property
    def lane(self) -> Lane:
        return self.request.lane

    @property
    def num_results(self) -> int:
        return 1

    @property
    def path(self) -> str:
        return UrlPath.CALL.value

    @property
    def max_response_bytes(self) -> int:
        return _MAX_RESPONSE_BYTES

    @property
    def is_short(self) -> bool:
        return False

    def encode(self, *, with_tokens: bool = False) -> bytes:
        """Return the body. Raise ValueError for arguments without a JSON form, such as NaN or too deep a nesting."""
        try:
            text = json.dumps(self.request.model_dump(), ensure_ascii=False, allow_nan=False)
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        return text.encode("utf-8", "replace")

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
        return [
            CallResult(id=self.request.id, valid=False, reason=reason, message=message[:2000], execute_seconds=seconds)
        ]
