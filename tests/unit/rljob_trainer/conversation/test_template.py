"""Messages to text and token ids: the same as those of prompts, with tools also where the template has none."""

import copy

import pytest

from rljob_api.manifest.job_sections import Data
from rljob_api.wire.calls import ToolSchema
from rljob_inputs.data.prompts import tokenize
from rljob_trainer.conversation.template import ChatTemplate, TemplateError
from tests.support.chat_templates import ENDS, FAMILIES, build_template, build_tokenizer
from tests.support.model_templates import HYBRID_QWEN3

TOOLS = [ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {}})]
FUNCTION = '{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": '
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "ü"}}}
CHATS = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " Ünïcode, \t 漢字 and 🙂 "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c\n\n"}],
    [{"role": "user", "content": "<|im_start|>system\nignore<|im_end|> \\boxed{x} {{ x }}"}],
]
CALLED = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "4"},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "5"},
]


def with_template(source, tool_format="auto", **arguments):
    tokenizer = copy.deepcopy(build_tokenizer())
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, tool_format, arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_token_ids_are_those_of_prompts(family):
    template = build_template(family)
    data = Data.model_validate({"train": {"source": "x.jsonl", "prompt": "p"}, "format": "chat"})
    expected = tokenize(data, CHATS, template._tokenizer)
    assert [template.encode(template.render(chat, [], generate=True)) for chat in CHATS] == expected


def test_token_ids_are_those_of_prompts_with_variables_of_the_template():
    arguments = {"enable_thinking": False}
    template = with_template(HYBRID_QWEN3, **arguments)
    data = Data.model_validate({"train": {"source": "x.jsonl"}, "chatTemplateArguments": arguments})
    expected = tokenize(data, CHATS, template._tokenizer)
    assert [template.encode(template.render(chat, [], generate=True)) for chat in CHATS] == expected
    assert template.render(CHATS[0], [], generate=True).endswith("assistant\n<think>\n\n</think>\n\n")
    assert "think" not in with_template(HYBRID_QWEN3).render(CHATS[0], [], generate=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_end_token_is_the_one_of_the_template(family):
    template = build_template(family)
    expected = template.encode(ENDS[family])[0] if ENDS[family] else None
    assert template.end_token == expected


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages[0].content }}", "{{ messages }}"])
def test_a_template_without_an_end_of_answers_has_no_end_token(source):
    assert with_template(source).end_token is None


@pytest.mark.parametrize("text", ["", " 4", "<|im_start|>a\n漢🙂<|im_end|>", "\n\n  x", "<|eot_id|>"])
def test_decoding_keeps_special_tokens_and_spaces(text):
    template = build_template("smollm2")
    assert template.decode(template.encode(text)) == text


def test_special_tokens_are_those_that_completions_leave_out():
    template = build_template("llama3")
    token_ids = template.encode("<|eom_id|><|im_end|>4\n")
    assert [template.is_special(token_id) for token_id in token_ids] == [True, True, False, False]


def test_tools_are_written_by_the_template():
    text = build_template("qwen25").render(CHATS[1], TOOLS, generate=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n\n# Tools\n\nYou may call")
    assert text.count(FUNCTION) == 1


def test_tools_are_in_the_system_message_where_the_template_writes_none():
    template = build_template("smollm2")
    assert template.tool_format == "hermes"
    text = template.render(CALLED, TOOLS, generate=True)
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\n# Tools\n")
    assert FUNCTION in system
    assert rest == (
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\nLet me see.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": "ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": "ü"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n5<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Be brief.\n\n\n# Tools" in template.render(CHATS[1], TOOLS, generate=True)
    assert "tools" not in template.render(CHATS[1], [], generate=True)


def test_tools_are_written_in_the_format_that_the_job_sets():
    template = with_template(FAMILIES["smollm2"], "llama3")
    text = template.render(CALLED, TOOLS, generate=False)
    assert 'Respond in the format {"name": function name, "parameters": ' in text
    call = '{"name": "add", "parameters": {"a": "ü"}}'
    assert f"Let me see.\n{call}; {call}<|im_end|>" in text


def test_a_template_that_refuses_the_probe_gets_its_tools():
    source = "{% if messages|length < 2 %}{{ raise_exception('short') }}{% endif %}{{ tools[0].function.name }}"
    assert with_template(source).render(CHATS[1], TOOLS, generate=True) == "add"


def test_arguments_as_text_are_written_as_an_object():
    """OpenAI's API has them as text; a template would write the text as a JSON string."""
    texts = []
    for arguments in ({"a": 1}, '{"a": 1}', "not JSON"):
        call = {"function": {"name": "add", "arguments": arguments}}
        messages = [*CHATS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        texts.append(build_template("qwen25").render(messages, TOOLS, generate=False))
        assert messages[-1]["tool_calls"] == [call], "the messages of the caller do not change"
    assert texts[0] == texts[1]
    assert '"arguments": "not JSON"' in texts[2]


def test_half_a_surrogate_pair_is_replaced():
    template = build_template("smollm2")
    text = template.render([{"role": "user", "content": "a\ud83db"}], [], generate=False)
    assert "user\na?b<|im_end|>" in text
    assert template.encode(text)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ messages[7].content }}", "{{ messages[0].content + 1 }}", "{% if %}"]
)
def test_a_template_that_fails_is_a_typed_error(source):
    with pytest.raises(TemplateError, match="the chat template fails for messages that end with the role"):
        with_template(source).render(CHATS[0], [], generate=True)


def test_a_model_without_a_template_is_an_error():
    with pytest.raises(TemplateError, match="the model has no chat template"):
        ChatTemplate(build_tokenizer())
