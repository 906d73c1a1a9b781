"""OpenAI's chat completions."""

import json

import pytest

from rljob_trainer.gateway.dialects.chat import ChatCompletions
from rljob_trainer.gateway.dialects.meaning import Rules
from rljob_trainer.gateway.types import RequestError

DIALECT = ChatCompletions()
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def validate(answer):
    """Return an answer as its client has it, whose import takes seconds."""
    from openai.types.chat import ChatCompletion

    return ChatCompletion.model_validate(answer)


def read(**body):
    return Rules().read(DIALECT, {"model": "policy", "messages": [USER], **body}, {})


def test_messages_keep_what_belongs_to_the_conversation():
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
        "refusal": None,
        "annotations": [],
        "reasoning": "why",
    }
    result = {"role": "tool", "tool_call_id": "call_0_0", "content": [{"type": "text", "text": "2"}]}
    request = read(messages=[{"role": "developer", "content": "Be brief."}, USER, answer, result])

    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call_0_0"},
    ]


def test_thinking_parts_are_the_reasoning_of_an_answer():
    parts = [
        {"type": "thinking", "thinking": "why", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "4"},
    ]
    [_, answer, _] = read(messages=[USER, {"role": "assistant", "content": parts}, USER]).messages
    assert answer == {"role": "assistant", "content": "4", "reasoning_content": "why"}
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].type: .*text alone"):
        read(messages=[{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "messages: required"),
        ([], "messages: required"),
        ({}, "messages: not a list"),
        (["Hi"], r"messages\[0\]: not an object"),
        ([{"role": "robot"}], r"messages\[0\].role: must be one of"),
        ([{"role": ["user"]}], r"messages\[0\].role: must be one of"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: not a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"content\[0\].type: .*text alone"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\].function: not an object"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}], r"function.name: not a string"),
        ([{"role": "tool", "tool_call_id": 1, "content": ""}], r"tool_call_id: not a string"),
    ],
)
def test_other_messages_are_refused_with_their_place(messages, problem):
    with pytest.raises(RequestError, match=problem):
        read(messages=messages)


def test_tools_are_read_and_none_hides_them():
    [tool] = read(tools=[TOOL], tool_choice="auto").tools
    assert (tool.name, tool.parameters) == ("add", {"type": "object", "properties": {"a": {}}})
    assert read(tools=[TOOL], tool_choice="none").tools == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"n": 2}, "n: not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias: not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format: not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format: not supported"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, r"tools\[0\].type: custom is not supported"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, r"tools\[0\].function.name"),
        ({"functions": [{"name": "add"}]}, "functions: not supported"),
        ({"max_tokens": 0}, "max_tokens: must be"),
        ({"max_tokens": "many"}, "max_tokens: must be"),
        ({"stream": "yes"}, "stream: not true or false"),
        ({"stream_options": [1]}, "stream_options: not an object"),
        ({"model": None}, "model: required"),
    ],
)
def test_what_changes_the_distribution_or_is_malformed_is_refused(body, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        read(**body)
    assert caught.value.status == 400


def test_limits_are_the_lowest_and_sampling_is_ignored():
    request = read(max_tokens=9, max_completion_tokens=5, stop="\n", temperature=0.1, top_p=None, seed=1, n=1)

    assert (request.max_tokens, request.stop, request.ignored) == (5, ["\n"], ("seed", "temperature"))


def test_answer_is_a_chat_completion(make_answer):
    response = validate(DIALECT.write(read(logprobs=True), make_answer(reasoning="why")))

    choice = response.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.refusal) == ("Four", "stop", None)
    assert choice.message.reasoning_content == choice.message.reasoning == "why"
    assert [(each.token, each.logprob) for each in choice.logprobs.content] == [("Fo", -0.5), ("ur", -0.25)]
    assert bytes(choice.logprobs.content[0].bytes) == b"Fo"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (7, 2, 9)


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("calls", [(), [("add", '{"a": 1}'), ("add", '{"a": 2}')]], ids=["text", "calls"])
def test_a_stream_adds_up_to_the_answer(make_answer, calls, logprobs):
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    answer = make_answer(content=None if calls else "Four", calls=calls)
    request = read(stream=True, stream_options={"include_usage": True}, logprobs=logprobs, tools=[TOOL])
    *events, done = DIALECT.events(request, answer)

    state = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: ")))
    streamed = state.get_final_completion().model_dump(exclude_none=True)
    whole = validate(DIALECT.write(request, answer)).model_dump(exclude_none=True)

    for call in streamed["choices"][0]["message"].get("tool_calls", []):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    for each in (streamed, whole):
        each["choices"][0]["message"]["content"] = each["choices"][0]["message"].get("content") or ""
    assert streamed == whole
    assert done == b"data: [DONE]\n\n"


def test_a_stream_has_counts_only_if_asked(make_answer, read_events):
    events = read_events(DIALECT.events(read(stream=True), make_answer()))
    assert all("usage" not in event and event.get("choices", [1]) for event in events)


def test_errors_have_the_form_of_the_api():
    body = DIALECT.error(400, "turn_limit", "no more")
    assert body == {
        "error": {"message": "no more", "type": "invalid_request_error", "param": None, "code": "turn_limit"}
    }
    event = DIALECT.error_event(503, "x", "y")
    assert json.loads(event.removeprefix(b"data: "))["error"]["type"] == "server_error"
