"""TRL: the classes of environment_factory. Public methods are tools, reset(**row) begins an episode, and get_reward()
scores it. One instance per process, reset for each episode, as TRL does. Standard library only.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from rljob_api.errors import UserError
from rljob_api.functions.forms import FormError
from rljob_service.worker.environments.base import Answer, Model
from rljob_service.worker.environments.stepping import Step, append_text, play_steps, row_of
from rljob_service.worker.episodes.types import Episode, Message, Reply
from rljob_service.worker.forms.json_values import to_log
from rljob_service.worker.forms.tool_schema import describe_tool

_RESET: Final = "reset"
_GET_REWARD: Final = "get_reward"
_CHOICE: Final = "environment"
"""The column that chooses among several environments."""


class ToolEnvironment(NamedTuple):
    instance: Any
    tools: Mapping[str, Callable[..., Any]]
    schemas: list[dict[str, Any]]


def load(id: str, args: dict[str, Any]) -> Any:
    raise UserError(f"agent.environment.id: TRL has no names of environments, got {id}; name the class as MODULE:NAME")


def adopt(value: Any, args: dict[str, Any]) -> dict[str | None, ToolEnvironment]:
    factories = value if isinstance(value, Mapping) else {None: value}
    return {name: _prepare(factory, args) for name, factory in factories.items()}


def is_environment(name: str, value: Any) -> bool:
    return inspect.isclass(value) and inspect.isfunction(getattr(value, _RESET, None))


def _prepare(factory: Any, args: dict[str, Any]) -> ToolEnvironment:
    """Create an instance, and describe its tools."""
    instance = factory(**args)
    methods = dict(inspect.getmembers(type(instance), predicate=inspect.isfunction))
    if _RESET not in methods:
        raise UserError(f"{type(instance).__name__} has no method {_RESET}, which begins an episode in TRL")
    names = [name for name in methods if name not in (_RESET, _GET_REWARD) and not name.startswith("_")]
    tools = {name: getattr(instance, name) for name in names}
    try:
        return ToolEnvironment(instance, tools, [describe_tool(name, tool, {}) for name, tool in tools.items()])
    except FormError as error:
        raise UserError(f"{type(instance).__name__}: {error}") from None


async def play(environments: dict[str | None, ToolEnvironment], episode: Episode, model: Model) -> Reply:
    row = row_of(episode)
    chosen = row.pop(_CHOICE, None) if None not in environments else None
    if chosen not in environments:
        raise UserError(f"column {_CHOICE}: {chosen!r} is not one of {', '.join(map(str, environments))}")
    environment = environments[chosen]
    observation = await _wait(environment.instance.reset(**row))
    messages = episode.prompt if observation is None else append_text(episode.prompt, observation, separator="")

    async def take(answer: Answer) -> Step:
        calls = answer.message.get("tool_calls") or []
        results = [await _call(environment.tools, call) for call in calls]
        return Step(results, done=not calls)

    played = await play_steps(episode, model, messages, take, environment.schemas)
    reward = await _wait(environment.instance.get_reward()) if hasattr(environment.instance, _GET_REWARD) else None
    public = {key: value for key, value in vars(environment.instance).items() if not key.startswith("_")}
    state = {key: value for key, value in public.items() if isinstance(value, (str, int, float, bool, list, dict))}
    return Reply(reward, state=to_log(state), info={"end": played.end, "turns": played.num_turns})


async def _call(tools: Mapping[str, Callable[..., Any]], call: Mapping[str, Any]) -> Message:
    """Return the message of a tool call's result; of a failed one, as TRL shows it."""
    name = call["function"]["name"]
    try:
        arguments = call["function"]["arguments"]
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")
        result = await _wait(tools[name](**given))
    except Exception as error:
        result = {"error": str(error)}
    content = result if isinstance(result, list) else str(result)
    return {"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": content}


async def _wait(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
