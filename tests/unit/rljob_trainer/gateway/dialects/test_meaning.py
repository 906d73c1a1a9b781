"""What a field means: for each API the same."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.gateway.dialects.meaning import Rules
from rljob_trainer.gateway.server import DIALECTS
from rljob_trainer.gateway.types import RequestError

CHAT, COMPLETIONS, RESPONSES, MESSAGES = DIALECTS
USER = [{"role": "user", "content": "Hi"}]
BODIES = {
    CHAT: {"model": "policy", "messages": USER},
    COMPLETIONS: {"model": "policy", "prompt": "Hi"},
    RESPONSES: {"model": "policy", "input": "Hi"},
    MESSAGES: {"model": "policy", "messages": USER, "max_tokens": 9},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
KEEPS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
CLEARS = {"edits": [*KEEPS["edits"], {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}]}
THINKS = {"enable_thinking", "reasoning_effort"}
every_api = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.path.rpartition("/")[2])


def read(dialect, body, *, ignores=False, arguments=None, variables=()):
    rules = Rules(ignores, arguments or {}, set(variables).__contains__)
    return rules.read(dialect, {**BODIES[dialect], **body}, {})


@every_api
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("min_tokens", {"min_tokens": 3}),
        ("guided_grammar", {"guided_grammar": "root ::= a"}),
        ("response_format", {"response_format": SCHEMA}),
        ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
        ("text.format", {"text": {"format": SCHEMA, "verbosity": None}}),
        ("output_config.format", {"output_config": {"format": SCHEMA}}),
        ("chat_template", {"chat_template": "{{ 1 }}"}),
        ("context_management", {"context_management": CLEARS}),
        ("context_management", {"context_management": [{"type": "compaction", "compact_threshold": 9}]}),
        ("continue_final_message", {"continue_final_message": True}),
        ("add_generation_prompt", {"add_generation_prompt": False}),
        ("mcp_servers", {"mcp_servers": [{"url": "http://x"}]}),
    ],
)
def test_what_changes_prompt_or_sampling_is_refused_or_named(dialect, path, body):
    with pytest.raises(RequestError, match=rf"^{path}: not supported: .* set agent.constraints: ignore") as caught:
        read(dialect, body)
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
    assert read(dialect, body, ignores=True).ignored == (path,)


@every_api
@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize(
    "body", [{"n": 2}, {"best_of": 3}, {"conversation": "c"}, {"background": True}, {"echo": True}]
)
def test_what_no_answer_has_is_refused_always(dialect, body, ignores):
    with pytest.raises(RequestError, match=rf"^{next(iter(body))}: not supported: .*; remove it$"):
        read(dialect, body, ignores=ignores)


@every_api
@pytest.mark.parametrize(
    "body",
    [
        {"n": 1, "logit_bias": {}, "response_format": {"type": "text"}},
        {"logit_bias": None, "previous_response_id": None, "background": False},
        {"text": {"format": {"type": "text"}}},
        {"add_generation_prompt": True, "continue_final_message": False},
        {"context_management": KEEPS},
        {"context_management": {"edits": []}},
    ],
)
def test_what_asks_for_nothing_is_accepted(dialect, body):
    assert read(dialect, body).ignored == ()


@every_api
def test_what_changes_nothing_is_named(dialect):
    body = {"temperature": 0.0, "seed": None, "of_tomorrow": [1], "text": {"verbosity": "low"}, "metadata": {}}
    assert read(dialect, body).ignored == ("metadata", "of_tomorrow", "temperature", "text.verbosity")


OFF = {"enable_thinking": False}
VARIABLES = [
    ("enable_thinking", OFF, "enable_thinking", False),
    ("chat_template_kwargs.enable_thinking", {"chat_template_kwargs": OFF}, "enable_thinking", False),
    ("thinking", {"thinking": {"type": "disabled"}}, "enable_thinking", False),
    ("reasoning_effort", {"reasoning_effort": "low"}, "reasoning_effort", "low"),
    ("reasoning.effort", {"reasoning": {"effort": "low"}}, "reasoning_effort", "low"),
    ("output_config.effort", {"output_config": {"effort": "low"}}, "reasoning_effort", "low"),
]  # fmt: skip


@every_api
@pytest.mark.parametrize(("path", "body", "name", "value"), VARIABLES)
def test_a_variable_of_the_template_is_that_of_the_job(dialect, path, body, name, value):
    problem = rf"^{path}: not supported: it changes the prompt.*spec.data.chatTemplateArguments sets {name}"
    for arguments in ({}, {name: "other"}):
        with pytest.raises(RequestError, match=problem):
            read(dialect, body, arguments=arguments, variables=THINKS)
        assert read(dialect, body, arguments=arguments, variables=THINKS, ignores=True).ignored == (path,)
    assert read(dialect, body, arguments={name: value}, variables=THINKS).ignored == ()


@every_api
@pytest.mark.parametrize(("path", "body"), [case[:2] for case in VARIABLES])
def test_a_variable_that_the_template_does_not_read_changes_nothing(dialect, path, body):
    obeyed = path in dialect.reads  # the messages API: whether the answer shows its reasoning
    assert read(dialect, body).ignored == (() if obeyed else (path,))


@pytest.mark.parametrize(
    ("dialect", "body", "names"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 5}, ("top_logprobs",)),
        (CHAT, {"logprobs": True, "top_logprobs": 1}, ()),
        (RESPONSES, {"top_logprobs": 5}, ("top_logprobs",)),
        (COMPLETIONS, {"logprobs": 5}, ("logprobs",)),
        (COMPLETIONS, {"logprobs": 1}, ()),
    ],
)
def test_of_the_likeliest_tokens_only_the_sampled_one_is_known(dialect, body, names):
    assert read(dialect, body).ignored == names


@given(
    body=st.dictionaries(
        st.sampled_from(["text", "reasoning", "thinking", "context_management", "n", "tool_choice", "tools", "x"]),
        st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
        | st.dictionaries(st.sampled_from(["type", "edits", "effort", "tools"]), st.integers() | st.text(max_size=3)),
    )
)  # fmt: skip
def test_any_value_is_read_or_refused(body):
    for dialect in DIALECTS:
        with contextlib.suppress(RequestError):
            read(dialect, body, ignores=True, variables=THINKS)
