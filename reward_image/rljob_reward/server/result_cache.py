"""Results by content (`cache: true`): the same sample asked under another id gets the same valid result.

Owns what counts as the same: everything in a request but its id and its lane. Bounded; the least used goes first.
Invariant: only valid results are kept, so a failure is always tried again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from rljob_api.wire.protocol import ScoreRequest, ScoreResult

if TYPE_CHECKING:
    from rljob_reward.server.scoring import Waiter

_MAX_RESULTS = 65_536
_DIGEST_BYTES = 16


class ResultCache:
    """The last results."""

    def __init__(self, max_results: int = _MAX_RESULTS) -> None:
        self._max_results = max_results
        self._results: OrderedDict[bytes, ScoreResult] = OrderedDict()

    def get(self, content: bytes, request_id: str) -> bytes | None:
        """The encoded result, as of this request; None when there is none."""
        result = self._results.get(content)
        if result is None:
            return None
        self._results.move_to_end(content)
        times = {"queue_seconds": 0.0, "execute_seconds": 0.0}
        return result.model_copy(update={"id": request_id, **times}).model_dump_json().encode()

    def put(self, content: bytes, result: ScoreResult) -> None:
        if result.valid:
            self._results[content] = result
            if len(self._results) > self._max_results:
                self._results.popitem(last=False)


def digest_content(request: ScoreRequest) -> bytes:
    """What two requests for the same sample have in common."""
    content = request.model_dump_json(exclude={"id", "lane"})
    return hashlib.blake2b(content.encode(), digest_size=_DIGEST_BYTES).digest()


class Follower:
    """A request that waits for the result of another one with the same content."""

    def __init__(self, request_id: str, waiter: Waiter) -> None:
        self._id = request_id
        self._waiter = waiter

    def deliver(self, result: bytes) -> None:
        own = ScoreResult.model_validate_json(result).model_copy(update={"id": self._id})
        self._waiter.deliver(own.model_dump_json().encode())

    def has_left(self) -> bool:
        return self._waiter.has_left()
