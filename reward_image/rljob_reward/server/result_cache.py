"""Results by content (`cache: true`): an equal sample under another id gets the same valid result.

Owns what counts as equal: everything in a request except its id and its lane. Bounded: drops the least recently used.
Invariant: only valid results are kept, so a failure is always retried.
"""

from __future__ import annotations

import hashlib

from cachetools import LRUCache

from rljob_api.wire.protocol import ScoreRequest, ScoreResult

_MAX_RESULTS = 65_536
_DIGEST_BYTES = 16


class ResultCache:
    """The most recently used results."""

    def __init__(self, max_results: int = _MAX_RESULTS) -> None:
        self._results: LRUCache[bytes, ScoreResult] = LRUCache(max_results)

    def get(self, content: bytes, request_id: str) -> bytes | None:
        """The encoded result under this request's id; None when there is none."""
        result = self._results.get(content)
        if result is None:
            return None
        times = {"queue_seconds": 0.0, "execute_seconds": 0.0}
        return result.model_copy(update={"id": request_id, **times}).model_dump_json().encode()

    def put(self, content: bytes, result: ScoreResult) -> None:
        if result.valid:
            self._results[content] = result


def digest_content(request: ScoreRequest) -> bytes:
    """Digest of what two requests for the same sample have in common."""
    content = request.model_dump_json(exclude={"id", "lane"})
    return hashlib.blake2b(content.encode(), digest_size=_DIGEST_BYTES).digest()
