"""The bodies of NeMo Gym's /verify."""

import json

import pytest

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreRequest
from rljob_trainer.rewards.messages import RewardCall

PROMPT = [{"role": "user", "content": "2+2?"}]
COLUMNS = {
    "options": [{"A": "4"}],
    "index": 7,
    "responses_create_params": {"input": "old", "tools": [], "instructions": "x"},
}
SAMPLE = ScoreRequest(
    id="g/1",
    prompt=PROMPT,
    completion="It is A.",
    ground_truth="A",
    answer_column="expected_answer",
    extra_info=COLUMNS,
)
CALL = RewardCall(SAMPLE, "nemoGym")


def test_the_body_has_the_row_and_the_answer_as_a_response():
    body = json.loads(CALL.encode())

    assert (body["expected_answer"], body["options"]) == ("A", [{"A": "4"}])
    assert body["responses_create_params"] == {"input": PROMPT, "tools": [], "instructions": "x"}
    [message] = body["response"]["output"]
    assert message["content"] == [{"type": "output_text", "text": "It is A.", "annotations": []}]
    alone = ScoreRequest(id="s", prompt="2+2?", completion="4")
    assert RewardCall(alone, "nemoGym").payload()["responses_create_params"] == {"input": "2+2?"}


def test_numbers_that_the_server_adds_are_components():
    text = json.dumps({**CALL.payload(), "reward": 1, "judged": True, "length": 0.5, "letter": "A", "none": None})
    [result] = CALL.read(text, 2.0)

    assert (result.score, result.components) == (1.0, {"judged": 1.0, "length": 0.5})
    assert result.execute_seconds == 2.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"reward": NaN}', InvalidReason.NOT_FINITE),
        ('{"reward": null}', InvalidReason.BAD_RETURN),
        ('{"reward": true}', InvalidReason.BAD_RETURN),
        ('{"score": 1}', InvalidReason.BAD_RETURN),
        ("[]", InvalidReason.BAD_RETURN),
        ("error", InvalidReason.BAD_RETURN),
    ],
)
def test_what_is_not_a_reward_is_an_invalid_sample(text, reason):
    assert CALL.read(text, 0.0)[0].reason is reason


def test_components_that_are_not_finite_are_left_out():
    [result] = CALL.read('{"reward": 0.5, "a": NaN, "b": 2}', 0.0)
    assert (result.score, result.components) == (0.5, {"b": 2.0})


def test_a_response_that_repeats_a_long_request_is_not_too_long():
    sample = SAMPLE.model_copy(update={"completion": "\n" * 1_000_000})
    call = RewardCall(sample, "nemoGym")
    answer = {**call.payload(), "reward": 1.0}
    assert len(json.dumps(answer)) < call.max_response_bytes
