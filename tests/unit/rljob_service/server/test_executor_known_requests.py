"""Which requests share a result: retries, and with `cache: true` equal samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreRequest, ScoreResult
from rljob_service.results import SampleReply, failure
from rljob_service.server import executor
from rljob_service.server.execution import Execution, build_response
from rljob_service.server.executor import KnownRequests, digest_content
from rljob_service.server.metrics import ServerMetrics


class Client:
    response = b""

    def deliver(self, response: bytes) -> None:
        self.response = response

    def is_disconnected(self) -> bool:
        return False

    def call_when_left(self, callback: Callable[[], None]) -> None: ...


def ask(known: KnownRequests, name: str, completion: str, score: float | None = None) -> ScoreResult | None:
    """Serve a request if its result is known; else execute it if there is a score (negative: a failure)."""
    request = ScoreRequest(id=name, prompt="p", completion=completion)
    client = Client()
    execution = Execution(request, request.model_dump_json().encode(), client, lambda execution: None)
    if not known.serve(execution, request):
        if score is None:
            return None
        known.add(execution)
        reply = SampleReply(score=score, components={}, reason=None, message="")
        replies = failure(InvalidReason.EXCEPTION, "no") if score < 0 else [reply]
        response = build_response(execution.id, execution.sample_ids, replies, execution.kind, "v", 1.0, 1.0)
        known.finish(execution, response)
        client.deliver(response.encoded)
    return ScoreResult.model_validate_json(client.response)


@pytest.fixture
def known() -> KnownRequests:
    return KnownRequests(ServerMetrics("test", 1), cache=True, max_cached_results=2)


def test_equal_sample_gets_the_cached_result_under_its_own_id(known: KnownRequests) -> None:
    ask(known, "1", "a", score=0.5)
    result = ask(known, "2", "a")
    assert result is not None
    assert (result.id, result.score, result.execute_seconds) == ("2", 0.5, 0.0)


def test_cache_drops_the_least_recently_used_result(known: KnownRequests) -> None:
    for name in "ab":
        ask(known, name, name, score=1.0)
    assert ask(known, "a again", "a")
    ask(known, "c", "c", score=1.0)
    assert ask(known, "b again", "b") is None
    assert ask(known, "a once more", "a")


def test_failed_result_is_neither_remembered_nor_cached(known: KnownRequests) -> None:
    ask(known, "1", "a", score=-1.0)
    assert ask(known, "1", "a") is None
    assert ask(known, "2", "a") is None


def test_retry_gets_the_remembered_response_without_cache() -> None:
    known = KnownRequests(ServerMetrics("test", 1), cache=False)
    first = ask(known, "1", "a", score=1.0)
    assert ask(known, "1", "a") == first
    assert ask(known, "1", "b") is None, "another sample under the same id"
    assert ask(known, "2", "a") is None


def test_content_is_everything_except_id_and_lane() -> None:
    request = ScoreRequest(id="1", prompt="p", completion="c", extra_info={"index": 1})
    assert digest_content(request) == digest_content(request.model_copy(update={"id": "2", "lane": "eval"}))
    for field, value in {"prompt": "q", "completion": "d", "ground_truth": 1, "data_source": "s"}.items():
        assert digest_content(request) != digest_content(request.model_copy(update={field: value})), field


def test_number_of_remembered_responses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_MAX_RESPONSES", 2)
    known = KnownRequests(ServerMetrics("test", 1), cache=False)
    for name in "abc":
        ask(known, name, "text", score=1.0)
    assert [ask(known, name, "text") is None for name in "abc"] == [True, False, False]


def test_bytes_of_remembered_responses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    first = KnownRequests(ServerMetrics("test", 1), cache=False)
    result = ask(first, "a", "text", score=1.0)
    assert result is not None
    num_bytes = len(result.model_dump_json(exclude={"abstained", "logprobs"}))
    monkeypatch.setattr(executor, "_MAX_RESPONSE_BYTES", int(2.5 * num_bytes))
    known = KnownRequests(ServerMetrics("test", 1), cache=False)
    for name in "abcd":
        ask(known, name, "text", score=1.0)
    assert [ask(known, name, "text") is None for name in "abcd"] == [True, True, False, False]
