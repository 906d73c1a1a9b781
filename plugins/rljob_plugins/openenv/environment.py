"""OpenEnv: Environment classes in this process, or EnvClient classes of a server that runs elsewhere.

Environments with MCP tools get the tool calls of an answer, all others its text . One instance, or one
session, per episode. Reads Pydantic models by their public attributes. Standard library only.
"""

import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from rljob_api.errors import UserError
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

_BASE_FIELDS: Final = ("done", "reward", "metadata")
"""Fields of each Observation; an Action has metadata."""
_MAX_SHOWN_CHARACTERS: Final = 500


def find_action_class(environment: type) -> type:
    """Return the class of actions: the annotation of `step`, else the first type argument of the base class."""
    for method in ("step_async", "step"):
        function = inspect.getattr_static(environment, method, None)
        try:
            found = typing.get_type_hints(function).get("action")
        except (NameError, TypeError):
            found = None
        if inspect.isclass(found) and _is_model(found) and found.__name__ != "Action":
            return found
    for base in (each for kind in environment.__mro__ for each in getattr(kind, "__orig_bases__", ())):
        first = next(iter(typing.get_args(base)), None)
        first = typing.get_origin(first) or first
        if first is dict or _is_model(first):
            return typing.cast(type, first)
    raise UserError(
        f"{environment.__name__}: its class of actions is not known; annotate `action` of step with a subclass of "
        "openenv's Action"
    )


def _is_model(value: Any) -> bool:
    return inspect.isclass(value) and hasattr(value, "model_validate")


def read_action(action_class: type, text: str) -> Any:
    """Return the action of an answer: its text, if the action has one field of text, else its JSON object. Raise
    NotAnActionError."""
    field = _find_text_field(action_class)
    if field is not None:
        return action_class(**{field: text})
    expected = f"Reply with one JSON object{_describe(action_class)}."
    begin, end = text.find("{"), text.rfind("}")
    if not 0 <= begin < end:
        raise NotAnActionError(expected)
    try:
        value = json.loads(text[begin : end + 1])
        return value if action_class is dict else action_class.model_validate(value)  # type: ignore[attr-defined]
    except (ValueError, RecursionError) as error:  # ValidationError is a ValueError
        raise NotAnActionError(f"{expected} {str(error)[:_MAX_SHOWN_CHARACTERS]}") from None


def _find_text_field(action_class: type) -> str | None:
    fields = _own_fields(action_class)
    required = {name: field for name, field in fields.items() if field.is_required()}
    candidates = required or fields
    if len(candidates) != 1:
        return None
    name, field = next(iter(candidates.items()))
    return name if field.annotation is str else None


def _own_fields(model: type) -> dict[str, Any]:
    fields = getattr(model, "model_fields", {})
    return {name: field for name, field in fields.items() if name not in _BASE_FIELDS}


def _describe(action_class: type) -> str:
    names = _own_fields(action_class)
    return f" with the keys {', '.join(names)}" if names else ""


def show(observation: Any) -> str:
    """Return an observation as text: its only field if that is text, else its fields as JSON; empty without fields."""
    own = {key: value for key, value in dump(observation).items() if key not in _BASE_FIELDS}
    if len(own) == 1 and isinstance(only := next(iter(own.values())), str):
        return only
    return json.dumps(to_log(own), ensure_ascii=False) if own else ""


def show_result(observation: Any) -> str:
    """Return the result of a tool call as text: its error, the text of MCP's content, or anything else as JSON."""
    fields = dump(observation)
    if fields.get("error"):
        return json.dumps({"error": to_log(fields["error"])}, ensure_ascii=False)
    result = fields.get("result")
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(parts, list) and parts and all(isinstance(each, dict) and "text" in each for each in parts):
        return "\n".join(each["text"] for each in parts)
    return result if isinstance(result, str) else json.dumps(to_log(result), ensure_ascii=False)


def dump(model: Any) -> dict[str, Any]:
    """Return the fields of a model, or of a dict."""
    dumped: dict[str, Any] = dict(model) if isinstance(model, Mapping) else model.model_dump(mode="json")
    return dumped


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
