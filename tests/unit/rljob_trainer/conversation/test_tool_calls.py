"""Tool calls in the text of an answer. tests/integration compares with vLLM's parsers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_trainer.conversation.tool_calls import Answer, ParsedCall, find_format, parse
from tests.support.chat_templates import FAMILIES

HERMES = '{"name": "add", "arguments": {"a": 1}}'
LLAMA3 = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("The answer is 4.", "The answer is 4.", []),
        (f"<tool_call>\n{HERMES}\n</tool_call>", "", [("add", {"a": 1})]),
        (f"So:\n<tool_call>{HERMES}</tool_call> after", "So:\n", [("add", {"a": 1})]),
        (f"<tool_call>{HERMES}</tool_call>\n<tool_call>{HERMES}</tool_call>", "", [("add", {"a": 1})] * 2),
        (f"<tool_call>{HERMES}", "", [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arg', "", [("", None)]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [("add", None)]),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "", [("add", None)]),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', "", [("", None)]),
        (f"<tool_call>[{HERMES}]</tool_call>", "", [("", None)]),
        (f"<tool_call></tool_call><tool_call>{HERMES}</tool_call>", "", [("", None), ("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>', "", [("", None)]),
        (LLAMA3, LLAMA3, []),
    ],
)
def test_hermes_calls(text, content, calls):
    answer = parse(text, "hermes")
    assert (answer.content, [(call.name, call.arguments) for call in answer.calls]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("The answer is 4.", "The answer is 4.", []),
        (LLAMA3, "", [("add", {"a": 1})]),
        (HERMES, "", [("add", {"a": 1})]),
        (f"<|python_tag|>{LLAMA3}", "", [("add", {"a": 1})]),
        (f"{LLAMA3}; {LLAMA3}", "", [("add", {"a": 1})] * 2),
        (f"Sure. {LLAMA3} Done.", "", [("add", {"a": 1})]),
        ('{"type": "function", "name": "add", "parameters": {"a": {"b": [{}]}}}', "", [("add", {"a": {"b": [{}]}})]),
        (r"It is \frac{1}{2}.", r"It is \frac{1}{2}.", []),
        (r"It is \frac{1}{2}. " + LLAMA3, r"It is \frac{1}{2}. " + LLAMA3, []),
        ('{"answer": 4}', '{"answer": 4}', []),
        ('{"name": "add", "parameters": {"a": 1}', "", [("", None)]),
        ('{"name": "add", "parameters": [1]}', "", [("add", None)]),
        ('{"name": "add"}', "", [("add", None)]),
        (f"{LLAMA3} {{", "", [("add", {"a": 1}), ("", None)]),
    ],
)
def test_llama3_calls(text, content, calls):
    answer = parse(text, "llama3")
    assert (answer.content, [(call.name, call.arguments) for call in answer.calls]) == (content, calls)


def test_a_call_has_the_text_that_the_policy_wrote():
    text = '{"arguments":{"a":1.50},"name":"add"}'
    assert parse(f"x<tool_call> {text}</tool_call>", "hermes") == Answer(
        "x", [ParsedCall("add", {"a": 1.5}, f" {text}")]
    )
    assert parse(f"x {text}", "llama3") == Answer("", [ParsedCall("add", {"a": 1.5}, text)])


@pytest.mark.parametrize("tool_format", ["hermes", "llama3"])
@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 10_000, '{"a":' * 100_000], ids=["lists", "digits", "objects"])
def test_a_value_that_json_cannot_read_is_a_call_without_arguments(tool_format, value):
    text = f'{{"name": "add", "arguments": {{"a": {value}}}}}'
    [call] = parse(text if tool_format == "llama3" else f"<tool_call>{text}", tool_format).calls
    assert call.arguments is None


@pytest.mark.parametrize("tool_format", ["hermes", "llama3"])
@given(parts=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"a"', ",", HERMES])))
def test_any_text_is_parsed(tool_format, parts):
    text = "".join(parts)
    answer = parse(text, tool_format)
    assert answer.calls or answer.content == text, "an answer without calls is all content"


@pytest.mark.parametrize(
    ("family", "expected"),
    [("smollm2", "hermes"), ("qwen25", "hermes"), ("qwen3", "hermes"), ("llama3", "llama3"), ("plain", "hermes")],
)
def test_format_of_a_template(family, expected):
    assert find_format(FAMILIES[family]) == expected


@pytest.mark.parametrize(
    "template", ["{{ tools }}[TOOL_CALLS]", "{{ tools }}<tool_call>\n<function=", "{% for tool in tools %}?"]
)
def test_an_unknown_format_is_an_error_that_names_the_field(template):
    with pytest.raises(UserError, match=r"spec\.agent\.toolFormat: auto does not recognize"):
        find_format(template)
