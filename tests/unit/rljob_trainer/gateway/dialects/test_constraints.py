"""Which constraints of a request are dropped, and that the dialects then read the rest."""

from __future__ import annotations

import pytest

from rljob_trainer.gateway.dialects.constraints import drop_constraints
from rljob_trainer.gateway.server import DIALECTS

FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
CHAT, _, RESPONSES, MESSAGES = DIALECTS
CHAT_BODY = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
RESPONSES_BODY = {"model": "policy", "input": "a"}
MESSAGES_BODY = {**CHAT_BODY, "max_tokens": 9}
CHAT_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
RESPONSES_TOOLS = {"tools": [{"type": "function", **FUNCTION}]}
MESSAGES_TOOLS = {"tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}]}


@pytest.mark.parametrize(
    ("dialect", "body", "names"),
    [
        (CHAT, {**CHAT_BODY, **CHAT_TOOLS, "tool_choice": "required"}, ["tool_choice"]),
        (CHAT, {**CHAT_BODY, **CHAT_TOOLS, "tool_choice": {"type": "function", "function": {}}}, ["tool_choice"]),
        (CHAT, {**CHAT_BODY, "response_format": SCHEMA, "guided_json": {}}, ["response_format"]),
        (CHAT, {**CHAT_BODY, "guided_choice": ["a", "b"]}, ["guided_choice"]),
        (RESPONSES, {**RESPONSES_BODY, **RESPONSES_TOOLS, "tool_choice": {"type": "function"}}, ["tool_choice"]),
        (RESPONSES, {**RESPONSES_BODY, "text": {"format": SCHEMA, "verbosity": "low"}}, ["text.format"]),
        (MESSAGES, {**MESSAGES_BODY, **MESSAGES_TOOLS, "tool_choice": {"type": "any"}}, ["tool_choice"]),
        (MESSAGES, {**MESSAGES_BODY, "output_config": {"format": SCHEMA}}, ["output_config.format"]),
    ],
)
def test_constraints_are_dropped_and_tools_stay(dialect, body, names):
    kept, dropped = drop_constraints(body)
    assert list(dropped) == names
    assert len(dialect.read(kept, {}).tools) == len(body.get("tools", ()))


@pytest.mark.parametrize(
    "extra",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": {"type": "none"}},
        {"text": {"format": {"type": "text"}}},
        {"text": 3},
        {"n": 2, "logit_bias": {"1": 2}},
    ],
)
def test_other_fields_are_left_to_the_dialects(extra):
    assert drop_constraints({**CHAT_BODY, **extra}) == ({**CHAT_BODY, **extra}, ())
