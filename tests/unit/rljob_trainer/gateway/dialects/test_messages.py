"""Anthropic's Messages API."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.gateway.dialects.meaning import Rules
from rljob_trainer.gateway.dialects.messages import Messages
from rljob_trainer.gateway.types import RequestError

DIALECT = Messages()
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
THINKING = {"type": "enabled", "budget_tokens": 1024}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def validate(answer):
    """Return an answer as its client has it, whose import takes seconds."""
    from anthropic.types import Message

    return Message.model_validate(answer)


def read(**body):
    return Rules().read(DIALECT, {"model": "policy", "max_tokens": 64, "messages": [QUESTION], **body}, {})


def test_system_text_is_the_first_message():
    system = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "!"},
    ]

    assert read(system="Be brief.").messages == [{"role": "system", "content": "Be brief."}, QUESTION]
    assert read(system=system).messages == [{"role": "system", "content": "Be brief.\n!"}, QUESTION]


def test_results_come_before_the_text_of_the_user():
    blocks = [
        {"type": "tool_result", "tool_use_id": "call_0_0", "content": [{"type": "text", "text": "4"}]},
        {"type": "tool_result", "tool_use_id": "call_0_1", "is_error": True, "content": "failed"},
        {"type": "tool_result", "tool_use_id": "call_0_2"},
        {"type": "text", "text": "Continue."},
    ]

    assert read(messages=[QUESTION, {"role": "user", "content": blocks}]).messages[1:] == [
        {"role": "tool", "tool_call_id": "call_0_0", "content": "4"},
        {"role": "tool", "tool_call_id": "call_0_1", "content": "Error: failed"},
        {"role": "tool", "tool_call_id": "call_0_2", "content": ""},
        {"role": "user", "content": "Continue."},
    ]


def test_tools_and_limits_are_read():
    request = read(
        tools=[{**ADD, "type": "custom"}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.0,
        thinking={"type": "disabled"},
        metadata={"user_id": "u"},
    )

    assert [(tool.name, tool.description) for tool in request.tools] == [("add", "Adds.")]
    assert (request.max_tokens, request.stop) == (64, ["END"])
    assert request.ignored == ("metadata", "temperature", "tool_choice.disable_parallel_tool_use")
    assert not request.with_reasoning
    assert read(tools=[ADD], tool_choice={"type": "none"}).tools == []


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
        ({"tools": [ADD, {"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[1\]\.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, r"output_config\.format"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages: must end with"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "2 + 2 ="}]}, "messages: must end with"),
        ({"messages": [{"role": "critic", "content": "x"}]}, r"messages\[0\]\.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\]\.content\[0\]\.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{}]}]}]},
            r"messages\[0\]\.content\[0\]\.content\[0\]\.type",
        ),
    ],
)
def test_unsupported_fields_are_refused_by_name(field, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        read(**field)

    assert caught.value.status == 400


def test_answer_is_text(make_answer):
    response = validate(DIALECT.write(read(), make_answer()))

    assert (response.id, response.stop_reason, response.content[0].text) == ("chatcmpl-1", "end_turn", "Four")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, 2)


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_tokens"), ("stop", "end_turn")])
def test_stop_reasons(make_answer, finish, reason):
    assert DIALECT.write(read(), make_answer(finish=finish))["stop_reason"] == reason


def test_the_stop_sequence_that_ended_an_answer_is_named(make_answer, read_events):
    answer = replace(make_answer(), stop="END")
    response = validate(DIALECT.write(read(), answer))
    assert (response.stop_reason, response.stop_sequence) == ("stop_sequence", "END")
    delta = read_events(DIALECT.events(read(stream=True), answer))[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    calls = replace(make_answer(calls=[("add", "{}")]), stop="END")
    assert DIALECT.write(read(), calls)["stop_reason"] == "tool_use"


def test_an_empty_answer_has_a_block(make_answer):
    assert DIALECT.write(read(), make_answer(content=None))["content"] == [{"type": "text", "text": ""}]


def test_calls_are_tool_use(make_answer):
    response = validate(DIALECT.write(read(), make_answer("I add.", calls=[("add", '{"a": 1}')])))

    assert response.stop_reason == "tool_use"
    assert [block.type for block in response.content] == ["text", "tool_use"]
    assert (response.content[1].id, response.content[1].input) == ("call_1_0", {"a": 1})


def test_reasoning_is_shown_if_the_request_enables_thinking(make_answer):
    answer = make_answer(reasoning="Sum.")

    shown = validate(DIALECT.write(read(thinking=THINKING), answer)).content
    assert [block.type for block in shown] == ["thinking", "text"]
    assert shown[0].signature
    assert [block["type"] for block in DIALECT.write(read(), answer)["content"]] == ["text"]


@given(
    content=st.none() | st.text(min_size=1, max_size=8),
    reasoning=st.text(max_size=8),
    arguments=st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3).map(json.dumps), max_size=3),
)
def test_echoed_answers_are_the_same_messages(make_answer, content, reasoning, arguments):
    answer = make_answer(content=content, reasoning=reasoning, calls=[("add", text) for text in arguments])
    blocks = json.loads(json.dumps(DIALECT.write(read(thinking=THINKING), answer), allow_nan=False))["content"]

    echoed = read(messages=[QUESTION, {"role": "assistant", "content": blocks}, QUESTION]).messages[1]

    assert echoed.get("content") == (answer.message["content"] if content or arguments else "")
    assert echoed.get("reasoning_content", "") == reasoning
    calls = echoed.get("tool_calls", [])
    assert [call["id"] for call in calls] == [f"call_1_{i}" for i in range(len(arguments))]
    for call, text in zip(calls, arguments, strict=True):
        assert json.loads(call["function"]["arguments"]) == json.loads(text)


def test_text_and_calls_in_two_messages_are_one_answer():
    call = {"type": "tool_use", "id": "call_0_0", "name": "add", "input": {}}
    given = [
        QUESTION,
        {"role": "assistant", "content": "I add."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0_0", "content": "4"}]},
    ]

    messages = read(messages=given).messages

    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["content"] == "I add."
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


def test_stream_has_the_events_of_the_api_in_order(make_answer, read_events):
    answer = make_answer("I add.", reasoning="Sum.", calls=[("add", '{"a": 1}')])
    request = read(stream=True, thinking=THINKING)
    events = read_events(DIALECT.events(request, answer))

    assert [event["event"] for event in events] == [event["type"] for event in events]
    assert [(event["type"], event.get("index")) for event in events] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert events[0]["message"]["content"] == []
    assert [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (410, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
    ],
)
def test_errors_have_the_form_of_the_api(read_events, status, kind):
    error = {"type": "error", "error": {"type": kind, "message": "what", "code": "why"}}

    assert DIALECT.error(status, "why", "what") == error
    assert read_events([DIALECT.error_event(status, "why", "what")]) == [{"event": "error", **error}]


def test_keep_alive_is_a_ping(read_events):
    assert read_events([DIALECT.keep_alive]) == [{"event": "ping", "type": "ping"}]
