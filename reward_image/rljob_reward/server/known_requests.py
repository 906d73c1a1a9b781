"""Requests whose result is known or on its way, by id and body, and with `cache: true` by content.

A request with the key of a pending execution joins it. Responses with only valid results are remembered for a while, so
a retry after a lost response costs nothing and cannot differ.
"""

from __future__ import annotations

from cachetools import LRUCache

from rljob_api.wire.protocol import ScoreRequest
from rljob_reward.server.execution import Execution, Follower, RequestKey
from rljob_reward.server.metrics import Metrics
from rljob_reward.server.responses import Request, ScoreResponse
from rljob_reward.server.result_cache import ResultCache, digest_content

_MAX_REMEMBERED = 4096


class KnownRequests:
    """Pending executions and earlier responses."""

    def __init__(self, metrics: Metrics, *, cache: bool) -> None:
        self._metrics = metrics
        self._pending: dict[RequestKey, Execution] = {}
        self._pending_by_content: dict[bytes, Execution] = {}
        self._responses: LRUCache[RequestKey, bytes] = LRUCache(_MAX_REMEMBERED)
        self._cache = ResultCache() if cache else None

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def digest(self, request: Request) -> bytes | None:
        """The request's key in the result cache; None where results are not cached."""
        return digest_content(request) if self._cache and isinstance(request, ScoreRequest) else None

    def serve(self, execution: Execution) -> bool:
        """Serve a new request from an earlier or a pending result. False: it must be executed."""
        [waiter] = execution.waiters
        if pending := self._pending.get(execution.key):
            pending.waiters.append(waiter)
            return True
        if (response := self._responses.get(execution.key)) is not None:
            waiter.deliver(response)
            return True
        if self._cache is None or execution.content is None:
            return False
        if (cached := self._cache.get(execution.content, execution.summary.id)) is not None:
            self._metrics.record_cache("hit")
            waiter.deliver(cached)
            return True
        equal = self._pending_by_content.get(execution.content)
        # A request of the other lane must not wait in this one's queue.
        if equal is None or (equal.lane != execution.lane and equal.started is None):
            self._metrics.record_cache("miss")
            return False
        self._metrics.record_cache("joined")
        equal.waiters.append(Follower(execution.summary.id, waiter))
        return True

    def add(self, execution: Execution) -> None:
        self._pending[execution.key] = execution
        if execution.content:
            self._pending_by_content[execution.content] = execution

    def finish(self, execution: Execution, response: ScoreResponse) -> None:
        del self._pending[execution.key]
        if execution.content and self._pending_by_content.get(execution.content) is execution:
            del self._pending_by_content[execution.content]
        if response.is_valid:
            self._responses[execution.key] = response.encoded
            if self._cache and execution.content:
                self._cache.put(execution.content, response.results[0])
