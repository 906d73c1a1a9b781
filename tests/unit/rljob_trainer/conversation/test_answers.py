"""Completions as messages: what the client gets, and what the template gets back. First reasoning, then calls."""

import json

import pytest

from rljob_trainer.conversation.answers import parse_answer, restore

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
OPEN = "<|im_start|>assistant\n<think>\n"


def read(text, tool_format="hermes", prompt="<|im_start|>assistant\n", *, has_reasoning=True):
    message = parse_answer(
        text, tool_format=tool_format, prompt_text=prompt, has_reasoning=has_reasoning, call_prefix="call_7"
    )
    json.dumps(message, ensure_ascii=False).encode()  # a response can have it
    original = restore(message, text, prompt_text=prompt, has_reasoning=has_reasoning)
    calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", [])]
    return message["content"], message.get("reasoning_content"), calls, original["content"]


ADDED = [("call_7_0", "add")]


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "original"),
    [
        ("4", "4", None, [], "4"),
        (" 4\n", " 4\n", None, [], " 4\n"),
        ("", "", None, [], ""),
        ("<think>\nWell.\n</think>\n\n4", "4", "Well.", [], "<think>\nWell.\n</think>\n\n4"),
        ("<think>Well.</think>4", "4", "Well.", [], "<think>Well.</think>4"),
        ("<think>\n\n</think>\n\n4", "4", "", [], "<think>\n\n</think>\n\n4"),
        ("<think>no end", "", "no end", [], "<think>no end"),
        ("So: <think>x</think>", "So: <think>x</think>", None, [], "So: <think>x</think>"),
        ("x</think>4", "x</think>4", None, [], "x</think>4"),
        (CALL, None, None, ADDED, ""),
        (f"So.\n{CALL} after", "So.", None, ADDED, "So."),
        (f"{CALL}{CALL}", None, None, [*ADDED, ("call_7_1", "add")], ""),
        (f"<think>\nAdd.\n</think>\n\n{CALL}", None, "Add.", ADDED, "<think>\nAdd.\n</think>\n\n"),
        (f"<think>{CALL}</think>4", "4", CALL, [], f"<think>{CALL}</think>4"),
        (f"<think>{CALL}", "", CALL, [], f"<think>{CALL}"),
        (f"{CALL}<tool_call>{{", f"{CALL}<tool_call>{{", None, [], f"{CALL}<tool_call>{{"),
        (CALL.replace('"add"', '""'), CALL.replace('"add"', '""'), None, [], CALL.replace('"add"', '""')),
        (CALL.replace("1", "NaN"), CALL.replace("1", "NaN"), None, [], CALL.replace("1", "NaN")),
        (CALL.replace("add", "\\ud83d"), CALL.replace("add", "\\ud83d"), None, [], CALL.replace("add", "\\ud83d")),
    ],
)
def test_parts_of_an_answer(text, content, reasoning, calls, original):
    assert read(text) == (content, reasoning, calls, original)


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "original"),
    [
        ("Well.\n</think>\n\n4", "4", "Well.", "<think>\nWell.\n</think>\n\n4"),
        ("no end", "", "no end", "<think>\nno end"),
        (f"Add.</think>{CALL}", None, "Add.", "<think>\nAdd.</think>"),
    ],
)
@pytest.mark.parametrize("has_reasoning", [True, False])
def test_a_prompt_may_open_the_reasoning(text, content, reasoning, original, has_reasoning):
    found = read(text, prompt=OPEN, has_reasoning=has_reasoning)
    assert (found[0], found[1], found[3]) == (content, reasoning, original)


def test_reasoning_is_content_where_the_template_does_not_know_it():
    text = f"<think>Well.</think>So: {CALL}"
    assert read(text, has_reasoning=False) == ("<think>Well.</think>So: ", None, ADDED, "<think>Well.</think>So: ")


def test_calls_are_content_without_tools():
    assert read(f"So: {CALL}", tool_format=None) == (f"So: {CALL}", None, [], f"So: {CALL}")


def test_llama_calls():
    text = '{"name": "add", "parameters": {"a": 1}}'
    assert read(text, "llama3") == (None, None, ADDED, "")


def test_arguments_are_text_for_the_client_and_an_object_for_the_template():
    message = parse_answer(CALL, tool_format="hermes", prompt_text="", has_reasoning=True, call_prefix="c")
    [call] = message["tool_calls"]
    assert call == {
        "id": "c_0",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": "ü"}'},
    }
    [restored] = restore(message, CALL, prompt_text="", has_reasoning=True)["tool_calls"]
    assert restored["function"]["arguments"] == {"a": 1, "b": "ü"}


def test_half_a_surrogate_pair_in_arguments_stays_escaped():
    text = CALL.replace("ü", "\\ud83d")
    message = parse_answer(text, tool_format="hermes", prompt_text="", has_reasoning=True, call_prefix="c")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": "\\ud83d"}'
