"""From a verdict to the answer on the wire: a ScoreResult for a sample, a GroupResult for a group.

Owns the one difference between the two: an execution is over samples, one or several, and everything before this
module is the same for both. Invariant: each sample gets one result; what ended the execution is the result of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rljob_api.wire.protocol import GroupRequest, GroupResult, Lane, ScoreRequest, ScoreResult
from rljob_reward.workers.process import Ended, Reply, Verdict

Request = ScoreRequest | GroupRequest


class Asked(NamedTuple):
    """What is kept of a request while it waits: enough to answer it."""

    id: str
    lane: Lane
    sample_ids: tuple[str, ...]
    is_group: bool

    @classmethod
    def of(cls, request: Request) -> Asked:
        if isinstance(request, GroupRequest):
            return cls(request.id, request.lane, tuple(sample.id for sample in request.samples), True)
        return cls(request.id, request.lane, (request.id,), False)


class Answer(NamedTuple):
    """What a request is answered."""

    results: list[ScoreResult]
    """[samples]"""
    encoded: bytes

    @property
    def is_valid(self) -> bool:
        """Whether nothing is left to be tried again."""
        return all(result.valid for result in self.results)


def build_answer(asked: Asked, verdict: Verdict, queue_seconds: float, execute_seconds: float, version: str) -> Answer:
    """All samples of an execution have its times."""
    replies: Sequence[Reply | Ended] = [verdict] * len(asked.sample_ids) if isinstance(verdict, Ended) else verdict
    results = [
        _build_result(sample_id, reply, queue_seconds, execute_seconds, version)
        for sample_id, reply in zip(asked.sample_ids, replies, strict=True)
    ]
    answer = GroupResult(id=asked.id, results=results) if asked.is_group else results[0]
    return Answer(results, answer.model_dump_json().encode())


def _build_result(
    sample_id: str, reply: Reply | Ended, queue_seconds: float, execute_seconds: float, version: str
) -> ScoreResult:
    return ScoreResult(
        id=sample_id,
        valid=reply.reason is None,
        score=None if isinstance(reply, Ended) else reply.score,
        components={} if isinstance(reply, Ended) else reply.components,
        reason=reply.reason,
        message=reply.message[:2000],
        queue_seconds=queue_seconds,
        execute_seconds=execute_seconds,
        version=version,
    )
