"""Calls of an OpenEnv environment's methods, and of the MCP tools that it offers as actions. Standard library only."""

import inspect
import json
from collections.abc import Mapping
from typing import Any, Final

from rljob_plugins.openenv.models import show_result
from rljob_service.worker.environments.base import Answer
from rljob_service.worker.environments.stepping import Step
from rljob_service.worker.episodes.types import Message

_INTERFACES: Final = "openenv.core.env_server.interfaces"
"""Where the async methods only call the sync ones."""


async def call(made: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method with the arguments that it takes; its async form where the class has one."""
    own = getattr(type(made), f"{name}_async", None)
    is_async = own is not None and own.__module__ != _INTERFACES
    method = getattr(made, f"{name}_async" if is_async else name)
    parameters = inspect.signature(method).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    value = method(*args, **{key: each for key, each in kwargs.items() if takes_all or key in parameters})
    return await value if inspect.isawaitable(value) else value


async def take_calls(made: Any, answer: Answer) -> Step:
    """An answer without calls ends the episode. The rewards of several calls add up."""
    from openenv.core.env_server.mcp_types import CallToolAction

    results: list[Message] = []
    rewards, done = [], not answer.message.get("tool_calls")
    for each in answer.message.get("tool_calls") or []:
        function = each["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
            action = CallToolAction(tool_name=function["name"], arguments=arguments)
        except ValueError as error:
            results.append(_result(each, json.dumps({"error": str(error)})))
            continue
        seen = await call(made, "step", action)
        results.append(_result(each, show_result(getattr(seen, "observation", seen))))
        rewards += [] if seen.reward is None else [seen.reward]
        done = done or bool(seen.done)
    return Step(results, sum(rewards) if rewards else None, done)


def _result(asked: Mapping[str, Any], text: str) -> Message:
    return {"role": "tool", "tool_call_id": asked.get("id", ""), "name": asked["function"]["name"], "content": text}


async def list_tools(made: Any) -> list[dict[str, Any]]:
    from openenv.core.env_server.mcp_types import ListToolsAction

    listed = made.list_tools() if hasattr(made, "list_tools") else call(made, "step", ListToolsAction())
    found = await listed
    tools = found if isinstance(found, list) else found.tools
    return [{"name": t.name, "description": t.description, "parameters": t.input_schema} for t in tools]
