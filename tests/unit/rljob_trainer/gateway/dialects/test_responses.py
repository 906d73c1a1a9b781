"""OpenAI's Responses API."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.gateway.dialects.meaning import Rules
from rljob_trainer.gateway.dialects.responses import Responses
from rljob_trainer.gateway.types import RequestError

DIALECT = Responses()
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}
TEXTS = st.text(min_size=1, max_size=8)


def validate(answer):
    """Return an answer as its client has it, whose import takes seconds."""
    from openai.types.responses import Response

    return Response.model_validate(answer)


def read(**body):
    return Rules().read(DIALECT, {"model": "policy", "input": "What is 2 + 2?", **body}, {})


def result(call_id, text="4"):
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def without_ids(items):
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


def test_input_is_a_text_or_items():
    items = [QUESTION, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Well?"}]}]

    assert read().messages == [QUESTION]
    assert read(input=items).messages == [QUESTION, {"role": "user", "content": "Well?"}]


def test_instructions_and_developer_messages_are_one_system_message():
    request = read(instructions="Be brief.", input=[{"role": "developer", "content": "Be right."}, QUESTION])

    assert request.messages == [{"role": "system", "content": "Be brief.\n\nBe right."}, QUESTION]


def test_tools_and_limits_are_read():
    request = read(tools=[ADD], tool_choice="auto", max_output_tokens=5, store=True, parallel_tool_calls=False)

    assert [tool.name for tool in request.tools] == ["add"]
    assert request.max_tokens == 5
    assert request.ignored == ("parallel_tool_calls", "store")
    assert read(tools=[ADD], tool_choice="none").tools == []


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ({"previous_response_id": "chatcmpl-1"}, "previous_response_id: not supported: .*send the whole conversation"),
        ({"conversation": "c"}, "conversation: not supported"),
        ({"background": True}, "background: not supported"),
        ({"prompt": {"id": "p"}}, "prompt: not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, r"text\.format: not supported"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]\.type: web_search"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": None}, "input: required"),
        ({"input": []}, "input: required"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, r"input\[0\]\.type: item_reference"),
        ({"input": [QUESTION, {"type": "computer_call"}]}, r"input\[1\]\.type: computer_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\]\.content\[0\]\.type"),
        ({"input": [{"role": "critic", "content": "x"}]}, r"input\[0\]\.role"),
        ({"input": [{"type": "function_call", "name": "add", "arguments": "{}"}]}, r"input\[0\]\.call_id"),
    ],
)
def test_unsupported_fields_are_refused_by_name(field, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        read(**field)

    assert caught.value.status == 400


def test_fields_that_ask_for_nothing_are_accepted():
    request = read(previous_response_id=None, background=False, text={"format": {"type": "text"}}, tools=None)

    assert request.ignored == ()


def test_answer_is_a_message(make_answer):
    response = validate(DIALECT.write(read(tools=[ADD]), make_answer()))

    assert (response.id, response.status, response.output_text) == ("chatcmpl-1", "completed", "Four")
    assert response.output[0].content[0].logprobs is None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 2, 9)


def test_a_cut_answer_is_incomplete(make_answer, read_events):
    answer = make_answer(finish="length")
    response = validate(DIALECT.write(read(), answer))

    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert read_events(DIALECT.events(read(stream=True), answer))[-1]["event"] == "response.incomplete"


def test_an_empty_answer_is_an_empty_message(make_answer):
    assert validate(DIALECT.write(read(), make_answer(content=None))).output_text == ""


def test_logprobs_are_given_if_asked_for(make_answer):
    request = read(include=["message.output_text.logprobs"], top_logprobs=2)
    response = validate(DIALECT.write(request, make_answer()))

    logprobs = response.output[0].content[0].logprobs
    assert [(entry.token, entry.logprob) for entry in logprobs] == [("Fo", -0.5), ("ur", -0.25)]
    assert [entry.top_logprobs[0].token for entry in logprobs] == ["Fo", "ur"]


def test_reasoning_text_and_calls_are_items_in_this_order(make_answer):
    answer = make_answer(content="I add.", reasoning="Sum.", calls=[("add", '{"a": 1}'), ("add", '{"a": 2}')])

    output = validate(DIALECT.write(read(), answer)).output

    assert [item.type for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.call_id for item in output[2:]] == ["call_1_0", "call_1_1"]
    assert len({item.id for item in output}) == 4


def test_stream_has_the_events_of_the_api_in_order(make_answer, read_events):
    answer = make_answer(content="I add.", reasoning="Sum.", calls=[("add", '{"a": 1}')])
    request = read(stream=True)
    events = read_events(DIALECT.events(request, answer))

    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["event"] for event in events] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == DIALECT.write(request, answer)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], ""], "deltas follow"
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == (
        events[-1]["response"]["output"]
    )


@pytest.mark.parametrize("change", [list, without_ids], ids=["as received", "without ids"])
@given(
    content=st.none() | TEXTS,
    reasoning=st.just("") | TEXTS,
    arguments=st.lists(st.just("{}") | TEXTS.map(lambda text: json.dumps({"a": text})), max_size=3),
)
def test_echoed_answers_are_the_same_messages(make_answer, change, content, reasoning, arguments):
    history, expected = [QUESTION], [QUESTION]
    for number in (1, 2):
        calls = [("add", text) for text in arguments]
        answer = make_answer(content=content, reasoning=reasoning, calls=calls, id=f"chatcmpl-{number}")
        output = DIALECT.write(read(), answer)["output"]
        outputs = [result(item["call_id"]) for item in output if item["type"] == "function_call"]
        history += [*change(output), *(outputs or [QUESTION])]
        expected.append(answer.message if content or calls else {**answer.message, "content": ""})
        results = [{"role": "tool", "tool_call_id": each["call_id"], "content": "4"} for each in outputs]
        expected += results or [QUESTION]

    assert read(input=history).messages == expected


@pytest.mark.parametrize("change", [list, without_ids], ids=["as received", "without ids"])
def test_parallel_calls_with_results_in_between_are_one_message(make_answer, change):
    answer = make_answer(content=None, calls=[("add", "{}"), ("subtract", "{}")])
    first, second = change(DIALECT.write(read(), answer)["output"])

    messages = read(input=[QUESTION, first, result("call_1_0"), second, result("call_1_1", "0")]).messages

    assert messages == [
        QUESTION,
        answer.message,
        {"role": "tool", "tool_call_id": "call_1_0", "content": "4"},
        {"role": "tool", "tool_call_id": "call_1_1", "content": "0"},
    ]


def test_two_answers_in_a_row_stay_two(make_answer):
    first, second = make_answer(content="a", id="chatcmpl-1"), make_answer(content="b", reasoning="r", id="chatcmpl-2")
    items = [item for answer in (first, second) for item in DIALECT.write(read(), answer)["output"]]

    assert read(input=[QUESTION, *items]).messages == [QUESTION, first.message, second.message]
    assert read(input=[QUESTION, *without_ids(items)]).messages == [QUESTION, first.message, second.message]


def test_calls_of_other_servers_are_one_message_as_long_as_they_follow():
    calls = [{"type": "function_call", "call_id": f"toolu_{i}", "name": "add", "arguments": "{}"} for i in "ab"]
    text = {"role": "assistant", "content": "I add."}

    messages = read(input=[QUESTION, text, *calls, result("toolu_a"), result("toolu_b"), text]).messages

    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert len(messages[1]["tool_calls"]) == 2


def test_sorted_items_of_an_answer_are_one_message(make_answer):
    answer = make_answer(content="I add.", reasoning="Sum.", calls=[("add", "{}")])
    items = DIALECT.write(read(), answer)["output"]
    random.Random(0).shuffle(items)

    assert read(input=[QUESTION, *items]).messages == [QUESTION, answer.message]


def test_reasoning_of_another_server_without_text_is_left_out():
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}

    assert read(input=[QUESTION, reasoning, {"role": "assistant", "content": "4"}]).messages == [
        QUESTION,
        {"role": "assistant", "content": "4"},
    ]


def test_an_error_in_a_stream_has_the_fields_of_both_forms(read_events):
    (event,) = read_events([DIALECT.error_event(400, "turn_limit", "too many")])

    assert event["event"] == event["type"] == "error"
    assert event["error"] == {
        "message": "too many",
        "type": "invalid_request_error",
        "param": None,
        "code": "turn_limit",
    }
    assert event["message"] == "too many"
