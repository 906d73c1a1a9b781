"""The tools of a request, in the forms of all APIs, as functions that the policy may call. Pure.

tools that the program runs      the policy sees them; a custom tool of OpenAI's has one text
a namespace                      its tools, and calls of them name it
tools that the API's servers run refused; agent.constraints: ignore leaves them out
tool_choice                      none and allowed_tools hide tools; a forced call is refused or, with ignore, free
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rljob_api.wire.calls import ToolSchema
from rljob_trainer.gateway.dialects import fields

_TEXT = {"type": "string"}
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
        if kind in (None, "function") or _is_free_text(tool) or "input_schema" in tool:
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
        allowed = fields.read_object(given.get("allowed_tools", given), "tool_choice.allowed_tools")
        names = {_read_name(each) for each in fields.read_list(allowed.get("tools"), "tool_choice.tools")}
        tools, kind = [tool for tool in tools if _read_name(tool) in names], allowed.get("mode")
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
            forms[_read_name(tool)] = {"type": "custom"}
        elif "namespace" in tool:
            forms[_read_name(tool)] = {"namespace": tool["namespace"]}
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


def _find_function(tool: Any) -> Any:
    """Return what has the name: chat completions have it in a part."""
    return tool["function"] if isinstance(tool.get("function"), dict) else tool


def _read_name(tool: Any) -> str:
    return str(_find_function(fields.read_object(tool, "tools")).get("name"))


def _read_tool(tool: Mapping[str, Any], path: str) -> ToolSchema:
    given = _find_function(tool)
    schema = _FREE_TEXT if _is_free_text(tool) else given.get("parameters", given.get("input_schema"))
    where = path if given is tool else f"{path}.function"
    return fields.read_tool(given.get("name"), given.get("description"), schema, where)
