"""OpenEnv: Environment classes in this process, or EnvClient classes of a server that runs elsewhere.

Environments with MCP tools get the tool calls of an answer, all others its text (models). One instance, or one
session, per episode. Standard library only.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from rljob_api.errors import UserError
from rljob_plugins.openenv.models import dump, find_action_class, read_action, show, show_result
from rljob_service.worker.environments.base import Answer, Model
from rljob_service.worker.environments.model import text_of
from rljob_service.worker.environments.stepping import (
    NotAnActionError,
    Step,
    append_text,
    list_seeds,
    play_steps,
    row_of,
    seed_of,
)
from rljob_service.worker.episodes.types import Episode, Message, Reply
from rljob_service.worker.forms.json_values import to_log

OPTIONS: Final = "rljob"
"""The entry of args that is for this adapter: invalid_reward."""
_INTERFACES: Final = "openenv.core.env_server.interfaces"
"""Where the async methods only call the sync ones."""


class OpenEnvironment(NamedTuple):
    make: Callable[[], Any]
    action_class: type | None
    """None: its actions are the calls of MCP tools."""
    invalid_reward: float = 0.0
    """Reward of an answer that is not an action."""


def load(id: str, args: dict[str, Any]) -> OpenEnvironment:
    from openenv import AutoEnv

    try:
        return adopt(AutoEnv.get_env_class(id), args)
    except ValueError as error:
        raise UserError(f"agent.environment.id: {error}; name its class as MODULE:NAME") from error


def adopt(value: Any, args: dict[str, Any]) -> OpenEnvironment:
    if not inspect.isclass(value) or not is_environment("", value):
        raise UserError(f"{value!r} is neither a subclass of OpenEnv's Environment nor of EnvClient")
    given = {key: each for key, each in args.items() if key != OPTIONS}
    options = args.get(OPTIONS, {})
    action_class = None if _has_tools(value) else find_action_class(value)
    return OpenEnvironment(lambda: value(**given), action_class, **options)


def is_environment(name: str, value: Any) -> bool:
    bases = {base.__name__ for base in getattr(value, "__mro__", ())[1:]}
    return bool(bases & {"Environment", "EnvClient"})


def _has_tools(value: type) -> bool:
    return bool({base.__name__ for base in value.__mro__} & {"MCPEnvironment", "MCPClientBase"})


def rows(environment: OpenEnvironment, split: str) -> Iterator[dict[str, Any]]:
    """Return one row for each seed of `reset`."""
    return list_seeds(split)


async def play(environment: OpenEnvironment, episode: Episode, model: Model) -> Reply:
    made = environment.make()
    try:
        given = row_of(episode) | {"seed": seed_of(episode), "episode_id": f"{episode.id}-{episode.attempt}"}
        first = await call(made, "reset", **given)
        text = show(getattr(first, "observation", first))
        messages = append_text(episode.prompt, text) if text else episode.prompt
        if environment.action_class is None:
            tools = await list_tools(made)
            played = await play_steps(episode, model, messages, lambda answer: take_calls(made, answer), tools)
        else:
            played = await play_steps(episode, model, messages, lambda answer: _take_text(environment, made, answer))
        state = made.state() if callable(made.state) else made.state
        final = to_log(dump(await state if inspect.isawaitable(state) else state))
    finally:
        closed = made.close()
        if inspect.isawaitable(closed):
            await closed
    return Reply(rewards=played.rewards, state=final, info={"end": played.end, "turns": played.num_turns})


async def _take_text(environment: OpenEnvironment, made: Any, answer: Answer) -> Step:
    assert environment.action_class is not None
    try:
        action = read_action(environment.action_class, text_of(answer.message))
    except NotAnActionError as error:
        return Step([{"role": "user", "content": str(error)}], environment.invalid_reward)
    seen = await call(made, "step", action)
    text = show(getattr(seen, "observation", seen))
    return Step([{"role": "user", "content": text}], seen.reward, bool(seen.done))


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
