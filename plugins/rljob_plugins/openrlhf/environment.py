"""OpenRLHF: AgentInstance with reset and step. A step's rewards belong to its answer, environment_feedback is the next
message of the user.

`openrlhf` itself need not be installed: its package needs a GPU stack, which a runner does not. Where it is missing,
sources import its base classes from here. Standard library only.
"""

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any, Final

from rljob_api.errors import UserError
from rljob_service.worker.environments.base import Answer, Model
from rljob_service.worker.environments.model import text_of
from rljob_service.worker.environments.stepping import Step, play_steps
from rljob_service.worker.episodes.types import Episode, Message, Reply
from rljob_service.worker.forms.json_values import to_log

_MODULES: Final = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")
_INSTANCE: Final = "AgentInstance"
_BASES: Final = ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor")


class _Base:
    """In the place of a base class of OpenRLHF."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states


def _provide_bases() -> None:
    """Make openrlhf.utils.agent importable with its base classes."""
    package, utils, agent = (ModuleType(name) for name in _MODULES)
    vars(agent).update({name: type(name, (_Base,), {}) for name in _BASES})
    vars(utils)["agent"], vars(package)["utils"] = agent, utils
    sys.modules.update(zip(_MODULES, (package, utils, agent), strict=True))


if "openrlhf" not in sys.modules and importlib.util.find_spec("openrlhf") is None:
    _provide_bases()  # before the user's source runs


def load(id: str, args: dict[str, Any]) -> Any:
    raise UserError(f"agent.environment.id: OpenRLHF has no names of agents, got {id}; name the class as MODULE:NAME")


def adopt(value: Any, args: dict[str, Any]) -> partial[Any]:
    if not callable(getattr(value, "step", None)):
        raise UserError(f"{value!r} is not an agent of OpenRLHF: it must be a class with step, and perhaps reset")
    return partial(value, **args)


def is_environment(name: str, value: Any) -> bool:
    return name == _INSTANCE and inspect.isclass(value)


def is_async(environment: partial[Any]) -> bool:
    """Whether its methods are. Each episode has an instance of its own."""
    methods = [getattr(environment.func, name, None) for name in ("reset", "step")]
    return all(inspect.iscoroutinefunction(method) for method in methods if method is not None)


async def play(environment: partial[Any], episode: Episode, model: Model) -> Reply:
    made = environment()
    text = "\n\n".join(text_of(message) for message in episode.prompt)
    states = await _wait(made.reset({"observation": text, "label": episode.ground_truth}))
    first = states["observation"]
    messages: list[Message] = episode.prompt if first == text else [{"role": "user", "content": first}]
    log: dict[str, Any] = {}
    seen = first

    async def take(answer: Answer) -> Step:
        nonlocal seen
        action = text_of(answer.message)
        given = {"observation_text": seen, "action_text": action, "label": episode.ground_truth}
        out = await _wait(made.step({**given, "sampling_params": None}))
        log.update(_read_log(out))
        feedback = out["environment_feedback"]
        seen = f"{seen}{action}{feedback}"
        return Step([{"role": "user", "content": feedback}], _number(out["rewards"]), bool(out["done"]))

    played = await play_steps(episode, model, messages, take)
    return Reply(rewards=played.rewards, state={"end": played.end, "turns": played.num_turns}, info=log)


def _number(value: Any) -> Any:
    """Return a tensor of one element, of whatever shape, as a number."""
    is_single = hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1
    return value.item() if is_single else value


def _read_log(out: Mapping[str, Any]) -> dict[str, Any]:
    scores = {} if out.get("scores") is None else {"scores": out["scores"]}
    return {key: to_log(_number(value)) for key, value in {**scores, **(out.get("extra_logs") or {})}.items()}


async def _wait(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
