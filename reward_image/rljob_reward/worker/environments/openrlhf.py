"""OpenRLHF: AgentInstance with reset and step. A step's rewards belong to its answer, environment_feedback is the next
message of the user.

`openrlhf` itself need not be installed: its base classes are provided. Standard library only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rljob_api.errors import UserError
from rljob_reward.worker.adapters.json_values import to_log
from rljob_reward.worker.environments.base import Answer, Model
from rljob_reward.worker.environments.model import text_of
from rljob_reward.worker.environments.stepping import Step, play_steps
from rljob_reward.worker.episodes.types import Episode, Message, Reply

_INSTANCE: Final = "AgentInstance"
_MODULES: Final = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")
_BASES: Final = ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor")


class _Base:
    """In the place of a base class of OpenRLHF."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states


def provide_base_classes() -> None:
    """Make `openrlhf.utils.agent` importable where OpenRLHF is missing. Called before the source runs."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # the last one: an installed OpenRLHF wins


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_package = name != _MODULES[-1]
        return importlib.util.spec_from_loader(name, self, is_package=is_package) if name in _MODULES else None

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == _MODULES[-1]:
            vars(module).update({name: type(name, (_Base,), {}) for name in _BASES})


def load(id: str, args: dict[str, Any]) -> Any:
    raise UserError(f"agent.environment.id: OpenRLHF has no names of agents, got {id}; name the class as MODULE:NAME")


def adopt(value: Any, args: dict[str, Any]) -> Callable[[], Any]:
    if not callable(getattr(value, "step", None)):
        raise UserError(f"{value!r} is not an agent of OpenRLHF: it must be a class with step, and perhaps reset")
    return lambda: value(**args)


def is_environment(name: str, value: Any) -> bool:
    return name == _INSTANCE and inspect.isclass(value)


async def play(environment: Callable[[], Any], episode: Episode, model: Model) -> Reply:
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


def _number(reward: Any) -> Any:
    """Return a tensor of one element, of whatever shape, as a number."""
    return reward.item() if hasattr(reward, "item") else reward


def _read_log(out: Mapping[str, Any]) -> dict[str, Any]:
    scores = {} if out.get("scores") is None else {"scores": out["scores"]}
    logged: dict[str, Any] = to_log({**scores, **(out.get("extra_logs") or {})})
    return logged


async def _wait(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
