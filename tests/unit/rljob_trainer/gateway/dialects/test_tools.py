"""The tools of all APIs as functions of the policy."""

from __future__ import annotations

import pytest

from rljob_trainer.gateway.dialects.meaning import Rules
from rljob_trainer.gateway.server import DIALECTS
from rljob_trainer.gateway.types import RequestError

CHAT, _, RESPONSES, MESSAGES = DIALECTS
USER = [{"role": "user", "content": "Hi"}]
BODIES = {
    CHAT: {"model": "policy", "messages": USER},
    RESPONSES: {"model": "policy", "input": "Hi"},
    MESSAGES: {"model": "policy", "messages": USER, "max_tokens": 9},
}
SCHEMA = {"type": "object", "properties": {"a": {}}}


def write_function(dialect, name):
    """Return a function as an API writes it."""
    function = {"name": name, "parameters": SCHEMA}
    if dialect is CHAT:
        return {"type": "function", "function": function}
    return {"name": name, "input_schema": SCHEMA} if dialect is MESSAGES else {"type": "function", **function}


def read(dialect, tools, choice=None, *, ignores=False):
    body = {**BODIES[dialect], "tools": tools, "tool_choice": choice}
    request = Rules(ignores).read(dialect, body, {})
    return [tool.name for tool in request.tools], request.ignored


every_api = pytest.mark.parametrize("dialect", BODIES, ids=lambda each: each.path.rpartition("/")[2])


@every_api
@pytest.mark.parametrize(
    ("choice", "names"), [(None, ["add", "sub"]), ("auto", ["add", "sub"]), ({"type": "auto"}, ["add", "sub"]),
                          ("none", []), ({"type": "none"}, [])],
)  # fmt: skip
def test_tools_are_shown_or_hidden(dialect, choice, names):
    tools = [write_function(dialect, "add"), write_function(dialect, "sub")]
    assert read(dialect, tools, choice) == (names, ())
    request = Rules().read(dialect, {**BODIES[dialect], "tools": tools}, {})
    assert request.tools[0].parameters == SCHEMA


@every_api
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}, {"type": "any"}, {"type": "tool"}]
)
def test_a_forced_call_is_refused_or_free(dialect, choice):
    tools = [write_function(dialect, "add"), write_function(dialect, "sub")]
    with pytest.raises(
        RequestError, match=r"^tool_choice: .* a forced call is not the policy's own; remove it, or set"
    ):
        read(dialect, tools, choice)
    assert read(dialect, tools, choice, ignores=True) == (["add", "sub"], ("tool_choice",))


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_allowed_tools_hide_the_others(dialect, ignores):
    tools = [write_function(dialect, "add"), write_function(dialect, "sub")]
    allowed = {"mode": "auto", "tools": [tools[1]]}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if dialect is CHAT else allowed)}
    assert read(dialect, tools, choice, ignores=ignores) == (["sub"], ())


def test_a_forced_call_of_allowed_tools_is_free_among_them():
    tools = [write_function(RESPONSES, "add"), write_function(RESPONSES, "sub")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]}
    with pytest.raises(RequestError, match="a forced call"):
        read(RESPONSES, tools, choice)
    assert read(RESPONSES, tools, choice, ignores=True) == (["sub"], ("tool_choice",))


def test_parallel_calls_are_the_policys_choice():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    found = read(MESSAGES, [write_function(MESSAGES, "add")], choice)
    assert found == (["add"], ("tool_choice.disable_parallel_tool_use",))


@pytest.mark.parametrize(
    ("dialect", "tool", "kind"),
    [
        (RESPONSES, {"type": "web_search"}, "web_search"),
        (RESPONSES, {"type": "mcp", "server_label": "x"}, "mcp"),
        (RESPONSES, {"type": "local_shell"}, "local_shell"),
        (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}, "web_search_20250305"),
        (CHAT, {"type": "custom", "custom": {"name": "x"}}, "custom"),
    ],
)
def test_a_tool_that_the_policy_cannot_use_is_refused_or_left_out(dialect, tool, kind):
    tools = [write_function(dialect, "add"), tool]
    with pytest.raises(RequestError, match=rf"^tools\[1\].type: {kind} is not supported"):
        read(dialect, tools)
    assert read(dialect, tools, ignores=True) == (["add"], (f"tools.{kind}",))


def test_tools_of_a_namespace_are_tools_and_their_calls_name_it(make_answer):
    space = {"type": "namespace", "name": "agents", "tools": [write_function(RESPONSES, "spawn")]}
    request = Rules().read(RESPONSES, {**BODIES[RESPONSES], "tools": [write_function(RESPONSES, "add"), space]}, {})
    assert [tool.name for tool in request.tools] == ["add", "spawn"]
    answer = make_answer(None, calls=[("spawn", "{}"), ("add", "{}")])
    spawn, add = RESPONSES.write(request, answer)["output"]
    assert (spawn["namespace"], spawn["name"], "namespace" in add) == ("agents", "spawn", False)


def test_a_custom_tool_has_one_text_and_its_calls_are_custom(make_answer, read_events):
    tool = {"type": "custom", "name": "patch", "description": "Changes files.", "format": {"type": "text"}}
    body = {**BODIES[RESPONSES], "tools": [tool]}
    request = Rules().read(RESPONSES, body, {})
    [patch] = request.tools
    assert (patch.name, patch.description, patch.parameters["required"]) == ("patch", "Changes files.", ["input"])

    answer = make_answer(None, calls=[("patch", '{"input": "+ a"}')])
    [call] = RESPONSES.write(request, answer)["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", "+ a")
    events = read_events(RESPONSES.events(request, answer))
    assert [event["delta"] for event in events if event["event"] == "response.custom_tool_call_input.delta"] == ["+ a"]
    assert next(event for event in events if event["event"] == "response.output_item.added")["item"]["input"] == ""

    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    history = Rules().read(RESPONSES, {**body, "input": [{"role": "user", "content": "Hi"}, call, result]}, {}).messages
    assert history[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "+ a"}'}
    assert history[2] == {"role": "tool", "tool_call_id": call["call_id"], "content": "done"}


def test_a_grammar_of_a_custom_tool_is_refused_or_named():
    tool = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"},
    }
    with pytest.raises(RequestError, match=r"^tools\[0\].format: a grammar is not supported"):
        read(RESPONSES, [tool])
    assert read(RESPONSES, [tool], ignores=True) == (["patch"], ("tools.format",))
