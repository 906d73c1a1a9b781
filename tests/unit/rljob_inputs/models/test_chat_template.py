"""What a chat template says about a model: reasoning, the end of an answer, its variables."""

import pytest

from rljob_api.errors import UserError
from rljob_inputs.models.chat_template import TemplateSource
from tests.support.chat_templates import FAMILIES
from tests.support.model_templates import DEEPSEEK_R1, GEMMA3, GEMMA4, GPT_OSS, HYBRID_QWEN3, SMOLLM3

THINKING = {
    "qwen3, by default": (HYBRID_QWEN3, {}, True),
    "qwen3, asked to": (HYBRID_QWEN3, {"enable_thinking": True}, True),
    "qwen3, switched off": (HYBRID_QWEN3, {"enable_thinking": False}, False),
    "qwen3, misspelt": (HYBRID_QWEN3, {"enable_thinkin": False}, True),
    "deepseek-r1, whose prompt opens the reasoning": (DEEPSEEK_R1, {}, True),
    "smollm3, by default": (SMOLLM3, {}, True),
    "smollm3, switched off": (SMOLLM3, {"enable_thinking": False}, False),
    "gemma 4, by default": (GEMMA4, {}, False),
    "gemma 4, asked to": (GEMMA4, {"enable_thinking": True}, True),
    "gpt-oss, with little effort": (GPT_OSS, {"reasoning_effort": "low"}, True),
    "gemma 3": (GEMMA3, {}, False),
    "qwen 2.5": (FAMILIES["qwen25"], {}, False),
    "llama 3": (FAMILIES["llama3"], {}, False),
}


@pytest.mark.parametrize("name", THINKING)
def test_a_model_may_think_unless_the_prompt_closes_the_reasoning(name):
    text, arguments, thinks = THINKING[name]
    assert TemplateSource(text, {"bos_token": "<s>"}).can_think(arguments) == thinks


@pytest.mark.parametrize(
    ("text", "tail"),
    [
        (FAMILIES["qwen25"], "<|im_end|>"),
        (FAMILIES["llama3"], "<|eot_id|>"),
        (FAMILIES["plain"], ""),
        (GPT_OSS, "<|return|>"),
        (GEMMA3, "<end_of_turn>"),
        ("{{ raise_exception('no') }}", ""),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", ""),
    ],
)
def test_tail_is_what_follows_the_last_answer(text, tail):
    assert TemplateSource(text, {"bos_token": "<s>"}).find_tail({}) == tail


def test_variables_are_those_from_outside():
    assert TemplateSource(HYBRID_QWEN3).variables >= {"messages", "add_generation_prompt", "enable_thinking"}
    text = (
        "{% set effort = effort if effort is defined else 'low' %}{% macro write(a) %}{{ a }}{{ inner }}{% endmacro %}"
        "{% for m in messages %}{{ write(m.content) }}{% endfor %}{{ effort }}{{ strftime_now('') }}"
    )
    assert TemplateSource(text).variables == {"effort", "inner", "messages"}


def test_a_syntax_error_names_its_line():
    with pytest.raises(UserError, match=r"^is not a Jinja template: line 2: "):
        TemplateSource("{{ messages }}\n{% if %}")
