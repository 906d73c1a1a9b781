"""The response of an execution."""

from __future__ import annotations

from rljob_api.wire.protocol import GroupResult, InvalidReason, ScoreResult
from rljob_reward.results import SampleReply, failure
from rljob_reward.server.execution import build_response

VALID = SampleReply(score=0.1, components={"é": 1.0, "b": 1e300}, reason=None, message="")


def test_response_is_a_score_result_with_all_of_its_fields() -> None:
    encoded = build_response("a", ["a"], [VALID], False, "v1", 0.25, 1 / 3).encoded
    result = ScoreResult.model_validate_json(encoded)
    assert encoded == result.model_dump_json().encode()
    assert (result.valid, result.score, result.components) == (True, 0.1, VALID.components)
    assert (result.queue_seconds, result.execute_seconds, result.version) == (0.25, 1 / 3, "v1")


def test_response_to_a_group_has_one_result_per_sample() -> None:
    response = build_response("g", ["a", "b"], [VALID, *failure(InvalidReason.TIMEOUT, "late")], True, "v1")
    group = GroupResult.model_validate_json(response.encoded)
    assert response.encoded == group.model_dump_json().encode()
    assert [(result.id, result.reason) for result in group.results] == [("a", None), ("b", InvalidReason.TIMEOUT)]
    assert not response.is_valid
