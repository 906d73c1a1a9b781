"""`cache: true`: what counts as an equal request, and which results are kept."""

from __future__ import annotations

from rljob_api.wire.protocol import ScoreRequest, ScoreResult
from rljob_reward.server.result_cache import ResultCache, digest_content


def test_cache_drops_the_least_recently_used_result() -> None:
    cache = ResultCache(max_results=2)
    for number in range(2):
        cache.put(bytes([number]), ScoreResult(id=str(number), valid=True, score=number))
    assert cache.get(b"\0", "x")
    cache.put(b"\2", ScoreResult(id="2", valid=True, score=2))
    assert cache.get(b"\1", "x") is None
    assert cache.get(b"\0", "x")


def test_content_is_everything_except_id_and_lane() -> None:
    request = ScoreRequest(id="1", prompt="p", completion="c", extra_info={"index": 1})
    assert digest_content(request) == digest_content(request.model_copy(update={"id": "2", "lane": "eval"}))
    for field, value in {"prompt": "q", "completion": "d", "ground_truth": 1, "data_source": "s"}.items():
        assert digest_content(request) != digest_content(request.model_copy(update={field: value})), field
