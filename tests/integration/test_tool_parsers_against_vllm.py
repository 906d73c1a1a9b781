"""Calls are parsed as vLLM's own parsers `hermes` and `llama3_json` parse them."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.conversation.tool_calls import parse

pytestmark = pytest.mark.real

PARTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "\n",
            "; ",
            "Sure. ",
            "{",
            "}",
            "{}",
            "[",
            '"',
            '{"answer": 4}',
            r"\frac{1}{2}",
        ),
        *('{"name": "add", "arguments": {"a": 1.50}}', '{"arguments":{"b":[{}]},"name":"x"}', '{"name": "add"}'),
        *('{"name": "add", "parameters": {"a": "ü"}}', '{"name": 7, "arguments": {}}', '{"name": "a", "arguments": 1}'),
        *('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', '{"name": "x", "parameters": {"a": "{"}}'),
    ]
)


@pytest.fixture(scope="module")
def parsers():
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
    from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser

    tokenizer = SimpleNamespace(get_vocab=lambda: {"<|python_tag|>": 0})
    return {"hermes": Hermes2ProToolParser(tokenizer), "llama3": Llama3JsonToolParser(tokenizer)}


@pytest.mark.parametrize("tool_format", ["hermes", "llama3"])
@given(parts=st.lists(PARTS, min_size=1, max_size=7))
def test_calls_and_content_are_those_of_vllm(parsers, tool_format, parts):
    # vLLM 0.32 skips an object of llama3 that directly follows another; ours reads it.
    text = (" " if tool_format == "llama3" else "").join(parts)
    theirs, ours = parsers[tool_format].extract_tool_calls(text, request=None), parse(text, tool_format)
    if theirs.tools_called:
        expected = [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
        expected = [(name, value if isinstance(value, dict) else None) for name, value in expected]
        assert [(call.name, call.arguments) for call in ours.calls] == expected
        assert ours.content == (theirs.content or "")
    elif ours.calls:
        assert any(call.arguments is None for call in ours.calls), "vLLM takes it for content"
    else:
        assert ours.content == theirs.content
