"""The bodies of NeMo Gym's /verify."""

import json

import pytest

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreRequest, WholeCompletion
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


def items(completion, messages=None):
    whole = messages and WholeCompletion(text=completion, messages=messages)
    sample = SAMPLE.model_copy(update={"completion": completion, "whole": whole})
    found = RewardCall(sample, "nemoGym").payload()["response"]["output"]
    texts = {
        "message": lambda item: item["content"] if item["role"] == "user" else item["content"][0]["text"],
        "reasoning": lambda item: item["summary"][0]["text"],
        "function_call": lambda item: (item["call_id"], item["name"], item["arguments"]),
        "function_call_output": lambda item: (item["call_id"], item["output"]),
    }
    return [(item["type"], texts[item["type"]](item)) for item in found]


@pytest.mark.parametrize("opening", ["<think>\n", ""])
def test_reasoning_is_no_part_of_the_answer(opening):
    """NeMo Gym's servers take the first \\boxed{} of the text. A prompt may end with <think>."""
    assert items(f"{opening}Is it \\boxed{{B}}?\n</think>\n\nIt is \\boxed{{A}}.") == [
        ("reasoning", "Is it \\boxed{B}?"),
        ("message", "It is \\boxed{A}."),
    ]
    assert items("<think>cut off") == [("reasoning", "cut off"), ("message", "")]


def test_an_agents_calls_results_and_turns_are_items():
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "assistant", "content": None, "reasoning_content": "Add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "4"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    assert items("Yes.", messages) == [
        ("reasoning", "Add."),
        ("function_call", ("c0", "add", '{"a": 2}')),
        ("function_call_output", ("c0", "4")),
        ("message", "4"),
        ("message", "Sure?"),
        ("message", "Yes."),
    ]


def test_components_of_the_reward_are_components():
    answer = {"reward": 0.5, "reward_components": {"correctness": 1.0, "why": "x"}, "judged": 1}
    assert CALL.read(json.dumps(answer), 0.0)[0].components == {"judged": 1.0, "correctness": 1.0}


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
