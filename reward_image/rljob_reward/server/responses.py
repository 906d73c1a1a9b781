"""From the replies of a slot to the response on the wire: a ScoreResult for a sample, a GroupResult for a group.

Owns the one difference between the two; everything before this module treats both as an execution over samples.
Invariant: each sample gets one result.
"""

from __future__ import annotations

from typing import NamedTuple

from rljob_api.wire.protocol import GroupRequest, GroupResult, Lane, ScoreRequest, ScoreResult
from rljob_reward.results import ExecutionResult, SampleReply

Request = ScoreRequest | GroupRequest


class RequestSummary(NamedTuple):
    """The parts of a request that the response needs; the rest is freed while the request waits."""

    id: str
    lane: Lane
    sample_ids: tuple[str, ...]
    is_group: bool

    @classmethod
    def of(cls, request: Request) -> RequestSummary:
        if isinstance(request, GroupRequest):
            return cls(request.id, request.lane, tuple(sample.id for sample in request.samples), True)
        return cls(request.id, request.lane, (request.id,), False)


class ScoreResponse(NamedTuple):
    """The response to one request."""

    results: list[ScoreResult]
    """[samples]"""
    encoded: bytes

    @property
    def is_valid(self) -> bool:
        """Whether all results are valid, so that a retry could not improve them."""
        return all(result.valid for result in self.results)


def build_response(
    summary: RequestSummary, replies: ExecutionResult, queue_seconds: float, execute_seconds: float, version: str
) -> ScoreResponse:
    """Build the response to a request. All samples of an execution share its times."""
    if len(replies) == 1 and replies[0].reason is not None:
        replies = replies * len(summary.sample_ids)
    results = [
        _build_result(sample_id, reply, queue_seconds, execute_seconds, version)
        for sample_id, reply in zip(summary.sample_ids, replies, strict=True)
    ]
    response = GroupResult(id=summary.id, results=results) if summary.is_group else results[0]
    return ScoreResponse(results, response.model_dump_json().encode())


def _build_result(
    sample_id: str, reply: SampleReply, queue_seconds: float, execute_seconds: float, version: str
) -> ScoreResult:
    return ScoreResult(
        id=sample_id,
        valid=reply.reason is None,
        score=reply.score,
        components=reply.components,
        reason=reply.reason,
        message=reply.message,
        queue_seconds=queue_seconds,
        execute_seconds=execute_seconds,
        version=version,
    )
