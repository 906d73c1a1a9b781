"""The response of an execution."""

from __future__ import annotations

import pytest

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest, CallResult, UserReply
from rljob_api.wire.scores import GroupRequest, GroupResult, ScoreRequest, ScoreResult
from rljob_service.results import Reply, SampleReply, ToolCallReply, UserCallReply, failure
from rljob_service.server.execution import build_response

RARE = {"abstained", "logprobs"}
"""Fields that an older driver does not know."""
VALID = SampleReply(score=0.1, components={"é": 1.0, "b": 1e300}, reason=None, message="")


def test_response_is_a_score_result_with_all_of_its_fields() -> None:
    encoded = build_response("a", ["a"], [VALID], ScoreRequest, "v1", 0.25, 1 / 3).encoded
    result = ScoreResult.model_validate_json(encoded)
    assert encoded == result.model_dump_json(exclude=RARE).encode(), "an older driver does not know it"
    assert (result.valid, result.score, result.components) == (True, 0.1, VALID.components)
    assert (result.queue_seconds, result.execute_seconds, result.version) == (0.25, 1 / 3, "v1")


def test_functions_of_a_list_that_abstained_are_named() -> None:
    reply = VALID.model_copy(update={"abstained": ["code"]})
    encoded = build_response("a", ["a"], [reply], ScoreRequest, "v1").encoded
    assert ScoreResult.model_validate_json(encoded).abstained == ["code"]


def test_response_to_a_group_has_one_result_per_sample() -> None:
    response = build_response("g", ["a", "b"], [VALID, *failure(InvalidReason.TIMEOUT, "late")], GroupRequest, "v1")
    group = GroupResult.model_validate_json(response.encoded)
    assert response.encoded == group.model_dump_json(exclude={"results": {"__all__": RARE}}).encode()
    assert [(result.id, result.reason) for result in group.results] == [("a", None), ("b", InvalidReason.TIMEOUT)]


def test_failure_of_an_execution_is_that_of_each_sample() -> None:
    response = build_response("g", ["a", "b"], failure(InvalidReason.TIMEOUT, "late"), GroupRequest, "v1")
    group = GroupResult.model_validate_json(response.encoded)
    assert [(result.id, result.reason) for result in group.results] == [(each, InvalidReason.TIMEOUT) for each in "ab"]


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        (ToolCallReply(value="4", reason=None, message=""), "4"),
        (UserCallReply(value=UserReply(text="no"), reason=None, message=""), UserReply(text="no").model_dump()),
        (failure(InvalidReason.TIMEOUT, "late")[0], None),
    ],
)
def test_response_to_a_call_is_a_call_result(reply: Reply, value: object) -> None:
    encoded = build_response("a", ["a"], [reply], CallRequest, "v1", 0.25, 0.5).encoded
    result = CallResult.model_validate_json(encoded)
    assert (result.valid, result.value, result.reason) == (value is not None, value, reply.reason)
    assert encoded == result.model_dump_json().encode()


def test_number_that_json_does_not_have_is_null_in_the_response() -> None:
    reply = UserCallReply(value=UserReply(info={"x": float("nan")}), reason=None, message="")
    assert CallResult.model_validate_json(build_response("a", ["a"], [reply], CallRequest, "").encoded).value[
        "info"
    ] == {"x": None}
