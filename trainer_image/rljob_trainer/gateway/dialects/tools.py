"""The tools of a request, in the forms of all APIs, as functions that the policy may call. Pure.

tools that the program runs      the policy sees them; Anthropic's bash and text editor have their known arguments,
                                 and a custom tool of OpenAI's has one text
a namespace                      its tools, and calls of them name it
tools that the API's servers run refused; agent.constraints: ignore leaves them out
tool_choice                      none and allowed_tools hide tools; a forced call is refused or, with ignore, free
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rljob_api.wire.calls import ToolSchema
from rljob_trainer.gateway.dialects import fields

_TEXT = {"type": "string"}
_KNOWN: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "bash_": ("Run a command in a shell.", {"command": _TEXT, "restart": {"type": "boolean"}}, []),
    "text_editor_": (
        "View, create and edit text files.",
        {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
            "insert_line": {"type": "integer"},
            "view_range": {"type": "array", "items": {"type": "integer"}},
        },
        ["command", "path"],
    ),
}
"""Tools of Anthropic's API that the program runs, by the start of their type: description, arguments, required."""
_FREE_TEXT = {"type": "object", "properties": {"input": _TEXT}, "required": ["input"]}


def choose_tools(body: Mapping[str, Any], *, ignores: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools that the policy sees, namespaces flattened, and the names of what has no effect. Raise
    RequestError for the others, unless it `ignores` them."""
    left_out: list[str] = []

    def leave_out(path: str, name: str, problem: str) -> None:
        if not ignores:
            remedy = "remove it, or set agent.constraints: ignore"
            raise fields.refuse(path, f"{problem}; {remedy}", "unsupported_value")
        left_out.append(name)

    tools: list[dict[str, Any]] = []
    for tool, path in _flatten(body.get("tools"), "tools"):
        kind = tool.get("type")
        if kind in (None, "function") or _is_free_text(tool) or "input_schema" in tool or _find_known(kind):
            tools.append(tool)
            if (fields.read_object(tool.get("format") or {}, f"{path}.format")).get("type") == "grammar":
                problem = "a grammar is not supported: it changes which tokens can be sampled"
                leave_out(f"{path}.format", "tools.format", problem)
        else:
            problem = f"{kind} is not supported: neither the policy nor the gateway can use it"
            leave_out(f"{path}.type", f"tools.{kind}", problem)
    choice = body.get("tool_choice")
    given = choice if isinstance(choice, dict) else {"type": choice}
    if given.get("disable_parallel_tool_use"):
        left_out.append("tool_choice.disable_parallel_tool_use")
    kind = given.get("type")
    if kind == "allowed_tools":
        allowed = given.get("allowed_tools", given)
        allowed = fields.read_object(allowed, "tool_choice.allowed_tools")
        listed = fields.read_list(allowed.get("tools"), "tool_choice.tools")
        names = {_name_of(each) for each in listed if isinstance(each, dict)}
        tools, kind = [tool for tool in tools if _name_of(tool) in names], allowed.get("mode")
    if kind not in (None, "auto", "none"):
        leave_out("tool_choice", "tool_choice", f"{kind} is not supported: a forced call is not the policy's own")
    return [] if kind == "none" else tools, left_out


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[ToolSchema]:
    """Return the functions of chosen tools."""
    return [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def find_forms(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return by name what the calls of a chosen tool have besides those of a function: a namespace, or the type
    custom."""
    forms: dict[str, dict[str, str]] = {}
    for tool in tools:
        if _is_free_text(tool):
            forms[_name_of(tool)] = {"type": "custom"}
        elif "namespace" in tool:
            forms[_name_of(tool)] = {"namespace": tool["namespace"]}
    return forms


def _flatten(tools: Any, path: str) -> Iterator[tuple[dict[str, Any], str]]:
    for index, value in enumerate(fields.read_list(tools, path)):
        tool, where = fields.read_object(value, f"{path}[{index}]"), f"{path}[{index}]"
        if tool.get("type") == "namespace":
            for inner, place in _flatten(tool.get("tools"), f"{where}.tools"):
                yield {**inner, "namespace": str(tool.get("name"))}, place
        else:
            yield tool, where


def _is_free_text(tool: Mapping[str, Any]) -> bool:
    """Whether it is a custom tool of OpenAI's responses; Anthropic's have a schema."""
    return tool.get("type") == "custom" and "name" in tool and "input_schema" not in tool


def _find_known(kind: Any) -> tuple[str, dict[str, Any], list[str]] | None:
    return next((known for start, known in _KNOWN.items() if str(kind).startswith(start)), None)


def _name_of(tool: Mapping[str, Any]) -> str:
    inner = tool.get("function")
    return str((inner if isinstance(inner, dict) else tool).get("name"))


def _read_tool(tool: Mapping[str, Any], path: str) -> ToolSchema:
    given, where = tool, path
    if isinstance(tool.get("function"), dict):  # of chat completions
        given, where = tool["function"], f"{path}.function"
    description, schema = given.get("description"), given.get("parameters", given.get("input_schema"))
    if known := _find_known(tool.get("type")):
        description, properties, required = known
        schema = {"type": "object", "properties": properties, "required": required}
    elif _is_free_text(tool):
        schema = _FREE_TEXT
    return fields.read_tool(given.get("name"), description, schema, where)
