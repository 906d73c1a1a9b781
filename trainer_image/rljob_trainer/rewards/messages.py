"""Requests to rewards and their responses: one sample or one group, in RLJob's protocol or OpenRLHF's. Pure.

Owns payloads and parsing; `transport` sends. Invariant: a response gives each sample of the request one result, and a
response that breaks the protocol becomes invalid results with a reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rljob_api.wire.contract import UrlPath
from rljob_api.wire.protocol import GroupRequest, GroupResult, InvalidReason, ScoreRequest, ScoreResult
from rljob_api.wire.retry_after import parse_retry_after

_DEFAULT_RETRY_AFTER_SECONDS = 1.0
_MIN_RETRY_AFTER_SECONDS = 0.05
_MAX_RETRY_AFTER_SECONDS = 60.0


@dataclass(frozen=True)
class RewardCall:
    """One request to a reward. Retries and hedges send the same one."""

    request: ScoreRequest | GroupRequest
    protocol: Literal["rljob", "openrlhf"] = "rljob"

    @property
    def samples(self) -> list[ScoreRequest]:
        return self.request.samples if isinstance(self.request, GroupRequest) else [self.request]

    @property
    def path(self) -> str:
        return (UrlPath.SCORE_GROUP if isinstance(self.request, GroupRequest) else UrlPath.SCORE).value

    def payload(self) -> dict[str, Any]:
        if self.protocol == "rljob":
            return self.request.model_dump(mode="json")
        prompts = [_prompt_text(sample) for sample in self.samples]
        return {
            "query": [f"{prompt}{sample.completion}" for prompt, sample in zip(prompts, self.samples, strict=True)],
            "prompts": prompts,
            "labels": [sample.ground_truth for sample in self.samples],
        }

    def read(self, text: str, seconds: float) -> list[ScoreResult]:
        """Return the results of a response with status 200.  [samples]"""
        ids = [sample.id for sample in self.samples]
        if self.protocol == "openrlhf":
            return parse_openrlhf(ids, text, seconds)
        if isinstance(self.request, GroupRequest):
            return parse_group_result(self.request.id, ids, text, seconds)
        return [parse_result(self.request.id, text, seconds)]

    def fail(self, reason: InvalidReason, message: str, seconds: float = 0.0) -> list[ScoreResult]:
        """Return the same invalid result for each sample.  [samples]"""
        return [invalid(sample.id, reason, message, seconds) for sample in self.samples]


def is_final(results: Sequence[ScoreResult]) -> bool:
    """Return whether a retry is useless. The same function on the same text abstains again."""
    return all(result.valid or result.reason is InvalidReason.ABSTAINED for result in results)


def invalid(request_id: str, reason: InvalidReason, message: str, seconds: float = 0.0) -> ScoreResult:
    """Return an invalid result that the client makes itself."""
    return ScoreResult(id=request_id, valid=False, reason=reason, message=message[:2000], execute_seconds=seconds)


def parse_result(request_id: str, text: str, seconds: float) -> ScoreResult:
    """Return the result in a reward server's response; invalid if it breaks the protocol."""
    try:
        result = ScoreResult.model_validate_json(text)
        _check_components([result])
    except ValueError as error:
        return invalid(request_id, InvalidReason.BAD_RETURN, f"not a ScoreResult: {error}", seconds)
    if result.id != request_id:
        return invalid(request_id, InvalidReason.BAD_RETURN, f"the response is for {result.id}", seconds)
    return result


def parse_group_result(group_id: str, ids: Sequence[str], text: str, seconds: float) -> list[ScoreResult]:
    """Return the results in a reward server's response for a group; all invalid if it breaks the protocol."""
    try:
        group = GroupResult.model_validate_json(text)
        if group.id != group_id:
            raise ValueError(f"the response is for {group.id}")
        if [result.id for result in group.results] != list(ids):
            raise ValueError(f"got {len(group.results)} results for {len(ids)} samples, or in a different order")
        _check_components(group.results)
    except ValueError as error:
        return [invalid(each, InvalidReason.BAD_RETURN, f"not a GroupResult: {error}", seconds) for each in ids]
    return group.results


def parse_openrlhf(ids: Sequence[str], text: str, seconds: float) -> list[ScoreResult]:
    """Parse `{"rewards": [0.5, ...]}`: one number per sample; the list and its entries may be nested once more."""
    try:
        numbers = _unnest(json.loads(text)["rewards"], len(ids))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        message = f"expected {len(ids)} rewards, got {text[:200]}: {error}"
        return [invalid(each, InvalidReason.BAD_RETURN, message, seconds) for each in ids]
    return [_number_result(each, number, seconds) for each, number in zip(ids, numbers, strict=True)]


def busy_seconds(retry_after: str | None) -> float:
    """Return for how long to avoid a replica that answered 429 with this Retry-After."""
    seconds = parse_retry_after(retry_after)
    if seconds is None:
        return _DEFAULT_RETRY_AFTER_SECONDS
    return min(max(seconds, _MIN_RETRY_AFTER_SECONDS), _MAX_RETRY_AFTER_SECONDS)


def _check_components(results: Sequence[ScoreResult]) -> None:
    """Raise ValueError if a component is not finite. Python's JSON parsers accept NaN and Infinity."""
    for result in results:
        for name, value in result.components.items():
            if not math.isfinite(value):
                raise ValueError(f"component {name} of {result.id} is {value}; omit it, or return a finite number")


def _unnest(value: Any, num: int) -> list[float]:
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        [value] = value
    listed = value if isinstance(value, list) else [value]
    if len(listed) != num:
        raise ValueError(f"got {len(listed)}")
    numbers = []
    for entry in listed:
        while isinstance(entry, list):
            [entry] = entry
        numbers.append(float(entry))
    return numbers


def _number_result(request_id: str, number: float, seconds: float) -> ScoreResult:
    if not math.isfinite(number):
        return invalid(request_id, InvalidReason.NOT_FINITE, f"reward is {number}", seconds)
    return ScoreResult(id=request_id, valid=True, score=number, execute_seconds=seconds)


def _prompt_text(request: ScoreRequest) -> str:
    if isinstance(request.prompt, str):
        return request.prompt
    return str(request.prompt[-1].get("content", ""))
