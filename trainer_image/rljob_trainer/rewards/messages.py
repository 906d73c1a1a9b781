"""Requests to rewards and their responses: one sample or one group, in RLJob's protocol or OpenRLHF's. Pure.

`Call` is what the transport needs of a request, of whatever kind.

Invariant: a response gives each sample one result, or invalid results with a reason if it breaks the protocol.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from rljob_api.wire.contract import MAX_RESULT_BYTES, UrlPath
from rljob_api.wire.protocol import GroupRequest, GroupResult, InvalidReason, Lane, ScoreRequest, ScoreResult
from rljob_api.wire.retry_after import parse_retry_after

_FINAL_REASONS = (InvalidReason.ABSTAINED, InvalidReason.BAD_REQUEST)
_DEFAULT_RETRY_AFTER_SECONDS = 1.0
_MIN_RETRY_AFTER_SECONDS = 0.05

_TOKEN_FIELDS = {"prompt_ids", "completion_ids"}
_MAX_RESPONSE_BYTES_PER_SAMPLE = 2 * MAX_RESULT_BYTES
"""A result with its id, version and message."""


class Outcome(Protocol):
    """What every result of a server has: of a sample, or of a function's call."""

    @property
    def valid(self) -> bool: ...
    @property
    def reason(self) -> InvalidReason | None: ...
    @property
    def message(self) -> str: ...
    @property
    def execute_seconds(self) -> float: ...
    @property
    def version(self) -> str: ...


R = TypeVar("R", bound=Outcome)


class Call(Protocol[R]):
    """One request. Retries and hedges send the same one."""

    @property
    def lane(self) -> Lane: ...
    @property
    def num_results(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def max_response_bytes(self) -> int: ...
    @property
    def is_short(self) -> bool:
        """Whether it is short, so neither hedged nor measured."""
        ...

    def encode(self, *, with_tokens: bool = False) -> bytes: ...
    def end(self) -> None:
        """Its last request has ended, with a response or without."""
        ...

    def read(self, text: str, seconds: float) -> list[R]: ...
    def fail(self, reason: InvalidReason, message: str, seconds: float = 0.0) -> list[R]: ...


@dataclass(frozen=True)
class RewardCall:
    """One request to a reward. Retries and hedges send the same one."""

    request: ScoreRequest | GroupRequest
    protocol: Literal["rljob", "openrlhf"] = "rljob"

    @property
    def samples(self) -> list[ScoreRequest]:
        return self.request.samples if isinstance(self.request, GroupRequest) else [self.request]

    @property
    def lane(self) -> Lane:
        return self.request.lane

    @property
    def num_results(self) -> int:
        return len(self.samples)

    @property
    def max_response_bytes(self) -> int:
        return _MAX_RESPONSE_BYTES_PER_SAMPLE * len(self.samples)

    @property
    def is_short(self) -> bool:
        """Whether it is the second half of sampleThenGroup."""
        return isinstance(self.request, GroupRequest) and self.request.results is not None

    @property
    def path(self) -> str:
        return (UrlPath.SCORE_GROUP if isinstance(self.request, GroupRequest) else UrlPath.SCORE).value

    def payload(self, *, with_tokens: bool = False) -> dict[str, Any]:
        """Return the JSON of the body. Token ids are longer than the text: most rewards do not read them."""
        if self.protocol == "rljob":
            return self.request.model_dump(mode="json", exclude=None if with_tokens else self._token_fields)
        prompts = [_prompt_text(sample) for sample in self.samples]
        return {
            "query": [f"{prompt}{sample.completion}" for prompt, sample in zip(prompts, self.samples, strict=True)],
            "prompts": prompts,
            "labels": [sample.ground_truth for sample in self.samples],
        }

    @property
    def _token_fields(self) -> Any:
        return {"samples": {"__all__": _TOKEN_FIELDS}} if isinstance(self.request, GroupRequest) else _TOKEN_FIELDS

    def encode(self, *, with_tokens: bool = False) -> bytes:
        """Return the body. Half surrogate pairs, which UTF-8 cannot encode, become question marks.

        Raise ValueError for data that has no JSON form, such as lists nested too deeply.
        """
        try:
            return json.dumps(self.payload(with_tokens=with_tokens), ensure_ascii=False).encode("utf-8", "replace")
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error

    def end(self) -> None:
        pass

    def read(self, text: str, seconds: float) -> list[ScoreResult]:
        """Return the results of a response with status 200; invalid ones if it breaks the protocol.  [samples]"""
        try:
            return self._parse_openrlhf(text, seconds) if self.protocol == "openrlhf" else self._parse(text)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            return self.fail(InvalidReason.BAD_RETURN, f"invalid response {text[:200]}: {error}", seconds)

    def _parse(self, text: str) -> list[ScoreResult]:
        if isinstance(self.request, GroupRequest):
            group = GroupResult.model_validate_json(text)
            if group.id != self.request.id:
                raise ValueError(f"it is for {group.id}")
            results = group.results
        else:
            results = [ScoreResult.model_validate_json(text)]
        ids = [result.id for result in results]
        if ids != [sample.id for sample in self.samples]:
            raise ValueError(f"it is for the samples {', '.join(ids)}")
        for result in results:
            for name, value in result.components.items():
                if not math.isfinite(value):  # Python's JSON parsers accept NaN and Infinity
                    raise ValueError(f"component {name} of {result.id} is {value}; omit it, or return a finite number")
        return results

    def _parse_openrlhf(self, text: str, seconds: float) -> list[ScoreResult]:
        """Parse `{"rewards": [0.5, ...]}`: one number per sample, in lists of any depth."""
        rewards = _flatten(json.loads(text)["rewards"])
        if len(rewards) != len(self.samples):
            raise ValueError(f"got {len(rewards)}")
        return [
            ScoreResult(id=sample.id, valid=True, score=number, execute_seconds=seconds)
            if math.isfinite(number)
            else invalid(sample.id, InvalidReason.NOT_FINITE, f"reward is {number}", seconds)
            for sample, number in zip(self.samples, rewards, strict=True)
        ]

    def fail(self, reason: InvalidReason, message: str, seconds: float = 0.0) -> list[ScoreResult]:
        """Return the same invalid result for each sample.  [samples]"""
        return [invalid(sample.id, reason, message, seconds) for sample in self.samples]


def is_final(results: Sequence[Outcome]) -> bool:
    """Return whether a retry is useless. The same function on the same text abstains again."""
    return all(result.valid or result.reason in _FINAL_REASONS for result in results)


def invalid(request_id: str, reason: InvalidReason, message: str, seconds: float) -> ScoreResult:
    return ScoreResult(id=request_id, valid=False, reason=reason, message=message[:2000], execute_seconds=seconds)


def busy_seconds(retry_after: str | None) -> float:
    """Return for how long to avoid a replica that answered 429 with this Retry-After."""
    seconds = parse_retry_after(retry_after)
    seconds = _DEFAULT_RETRY_AFTER_SECONDS if seconds is None else seconds
    return max(seconds, _MIN_RETRY_AFTER_SECONDS)


def _flatten(value: Any) -> list[float]:
    return [number for each in value for number in _flatten(each)] if isinstance(value, list) else [float(value)]


def _prompt_text(request: ScoreRequest) -> str:
    if isinstance(request.prompt, str):
        return request.prompt
    return str(request.prompt[-1].get("content", ""))
