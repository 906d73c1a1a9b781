"""Requests whose result is known or on its way, by id and body, and with `cache: true` by content.

A request with the key of a pending execution joins it. Responses with only valid results are remembered for a while, so
a retry after a lost response costs nothing and cannot differ. With a cache, an equal sample under another id gets the
same valid result; a failure is always retried. Bounded: responses drop the oldest, the cache what was used least
recently.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from cachetools import LRUCache

from rljob_api.wire.scores import ScoreRequest, ScoreResult
from rljob_service.kinds.base import Request
from rljob_service.server.execution import Execution, RequestKey, Response, Waiter
from rljob_service.server.metrics import ServerMetrics

_MAX_RESPONSES = 4096
_MAX_RESPONSE_BYTES = 256 << 20
"""Limit of all remembered responses: as many of the longest results of samples, but not of calls."""
_MAX_CACHED_RESULTS = 65_536


class KnownRequests:
    def __init__(self, metrics: ServerMetrics, *, cache: bool, max_cached_results: int = _MAX_CACHED_RESULTS) -> None:
        self._metrics = metrics
        self._pending: dict[RequestKey, Execution] = {}
        self._pending_by_content: dict[bytes, Execution] = {}
        self._responses: OrderedDict[RequestKey, bytes] = OrderedDict()
        self._num_response_bytes = 0
        self._cache: LRUCache[bytes, ScoreResult] | None = LRUCache(max_cached_results) if cache else None

    def serve(self, execution: Execution, request: Request) -> bool:
        """Serve a new request from an earlier or a pending result. False: it must be executed."""
        [waiter] = execution.waiters
        if pending := self._pending.get(execution.key):
            pending.add_waiter(waiter)
            return True
        if (response := self._responses.get(execution.key)) is not None:
            waiter.deliver(response)
            return True
        if self._cache is None or not isinstance(request, ScoreRequest):
            return False
        execution.content = digest_content(request)
        outcome = self._serve_equal(execution, execution.content, waiter)
        self._metrics.record_cache(outcome)
        return outcome != "miss"

    def _serve_equal(self, execution: Execution, content: bytes, waiter: Waiter) -> str:
        assert self._cache is not None
        if (result := self._cache.get(content)) is not None:
            own = {"id": execution.id, "queue_seconds": 0.0, "execute_seconds": 0.0}
            waiter.deliver(result.model_copy(update=own).model_dump_json().encode())
            return "hit"
        equal = self._pending_by_content.get(content)
        # A request of the other lane must not wait in this one's queue.
        if equal is None or (equal.lane != execution.lane and equal.started is None):
            return "miss"
        equal.add_waiter(_Follower(execution.id, waiter))
        return "joined"

    def add(self, execution: Execution) -> None:
        self._pending[execution.key] = execution
        if execution.content:
            self._pending_by_content[execution.content] = execution

    def finish(self, execution: Execution, response: Response) -> None:
        del self._pending[execution.key]
        if execution.content and self._pending_by_content.get(execution.content) is execution:
            del self._pending_by_content[execution.content]
        if all(reply.reason is None for reply in response.replies):  # a retry could not improve it
            self._responses[execution.key] = response.encoded
            self._num_response_bytes += len(response.encoded)
            while len(self._responses) > _MAX_RESPONSES or self._num_response_bytes > _MAX_RESPONSE_BYTES:
                self._num_response_bytes -= len(self._responses.popitem(last=False)[1])
            if self._cache is not None and execution.content:
                self._cache[execution.content] = ScoreResult.model_validate_json(response.encoded)


def digest_content(request: ScoreRequest) -> bytes:
    """Return the digest of everything in a request except its id and its lane."""
    content = request.model_dump_json(exclude={"id", "lane"})
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


class _Follower(NamedTuple):
    """A request that waits for the result of another one with equal content."""

    request_id: str
    waiter: Waiter

    def deliver(self, response: bytes) -> None:
        own = ScoreResult.model_validate_json(response).model_copy(update={"id": self.request_id})
        self.waiter.deliver(own.model_dump_json().encode())

    def is_disconnected(self) -> bool:
        return self.waiter.is_disconnected()

    def call_when_left(self, callback: Callable[[], None]) -> None:
        self.waiter.call_when_left(callback)
