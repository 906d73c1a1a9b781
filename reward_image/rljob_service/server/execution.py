"""One execution: of the reward over a sample or a group, or of a call. The requests that wait for it, and the response.

Owns the difference between the kinds; all other modules of the server treat them as an execution over samples, and a
call as one sample. Invariant: each sample gets one result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from pydantic_core import to_json

from rljob_api.wire.base import Lane
from rljob_api.wire.calls import CallRequest
from rljob_api.wire.scores import GroupRequest
from rljob_service.kinds import Request, RequestType
from rljob_service.results import CallReply, ExecutionResult, Reply, SampleReply
from rljob_service.server.traces import NO_SPANS
from rljob_service.slots import Kill

RequestKey = tuple[str, int]
"""id and hash of the body: a retry of the same sample or group has the same key."""


class Waiter(Protocol):
    """A request that waits for an execution's response."""

    def deliver(self, response: bytes) -> None: ...

    def is_disconnected(self) -> bool: ...

    def call_when_left(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client disconnects before its response."""


class Response(NamedTuple):
    replies: ExecutionResult  # [samples]
    encoded: bytes
    """A ScoreResult, a GroupResult or a CallResult as JSON."""


class Execution:
    """Created when a request arrives; other requests may join its waiters until it ends."""

    def __init__(
        self, request: Request, body: bytes, waiter: Waiter, on_abandoned: Callable[[Execution], None]
    ) -> None:
        self.id = request.id
        self.lane: Lane = request.lane
        self.kind = type(request)
        self.sample_ids = (
            [sample.id for sample in request.samples] if isinstance(request, GroupRequest) else [request.id]
        )
        self.body = body
        self.key: RequestKey = (request.id, hash(body))
        self.content: bytes | None = None
        """Its key in the result cache; None without a cache."""
        self.waiters: list[Waiter] = []
        self._on_abandoned = on_abandoned
        self.kill: Kill | None = None
        """Ends it, while it runs."""
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.spans = NO_SPANS
        self.add_waiter(waiter)

    def add_waiter(self, waiter: Waiter) -> None:
        self.waiters.append(waiter)
        waiter.call_when_left(self._check_abandoned)

    def _check_abandoned(self) -> None:
        if self.is_abandoned():
            self._on_abandoned(self)

    def is_abandoned(self) -> bool:
        return all(waiter.is_disconnected() for waiter in self.waiters)


def build_response(
    request_id: str,
    sample_ids: list[str],
    replies: ExecutionResult,
    kind: RequestType,
    version: str,
    queue_seconds: float = 0.0,
    execute_seconds: float = 0.0,
) -> Response:
    """Build the response to all waiters. All samples share the times of the execution."""
    if len(replies) == 1 and replies[0].reason is not None:
        replies = [replies[0]] * len(sample_ids)
    times = {"queue_seconds": queue_seconds, "execute_seconds": execute_seconds}
    results = [
        {
            "id": sample_id,
            "valid": reply.reason is None,
            **_read_values(reply, kind),
            "reason": reply.reason,
            "message": reply.message,
            **times,
            "version": version,
        }
        for sample_id, reply in zip(sample_ids, replies, strict=True)
    ]
    response = {"id": request_id, "results": results} if kind is GroupRequest else results[0]
    return Response(replies, to_json(response))


def _read_values(reply: Reply, kind: RequestType) -> dict[str, Any]:
    """Return the fields that only a ScoreResult or only a CallResult has. To validate either would cost more than the
    rest of the response."""
    if kind is CallRequest:
        return {"value": reply.value if isinstance(reply, CallReply) else None}
    if not isinstance(reply, SampleReply):
        return {"score": None, "components": {}, "pred": None}
    values = {"score": reply.score, "components": reply.components, "pred": reply.pred}
    rare = {"abstained": reply.abstained, "logprobs": reply.logprobs}
    return values | {name: value for name, value in rare.items() if value}
