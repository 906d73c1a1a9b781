"""verifiers: 0.4 (Taskset and Env of `verifiers.v1`) and 0.3 (`load_environment`, MultiTurnEnv, Rubric).

Both bring their loop and their client; they get the gateway's address and key. Their dataset has the tasks: the row's
`index` chooses one. This module decides which of the two an environment is. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rljob_api.errors import UserError
from rljob_plugins.verifiers import legacy, v1
from rljob_service.worker.environments.base import Model, Seat
from rljob_service.worker.episodes.types import Episode, Reply

_LOAD = "load_environment"


def load(id: str, args: dict[str, Any]) -> Any:
    if not _has_legacy():
        return v1.load(id, args)
    try:
        return legacy.load(id, args)
    except UserError:
        raise
    except (ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"agent.environment.id: {error}; its package belongs in agent.environment.packages") from error


def adopt(value: Any, args: dict[str, Any]) -> Any:
    return v1.adopt(value, args) if v1.is_taskset(value) else legacy.adopt(value, args)


def is_environment(name: str, value: Any) -> bool:
    return name == _LOAD or v1.is_taskset(value)


def seats(environment: Any) -> Sequence[Seat]:
    """Return the players of an environment of 0.4. One of 0.3 has a single player."""
    return getattr(environment, "seats", ())


def rows(environment: Any, split: str) -> Iterable[Mapping[str, Any]]:
    """Return the tasks of the environment's dataset."""
    found: Iterable[Mapping[str, Any]] = environment.rows(split)
    return found


async def play(environment: Any, episode: Episode, model: Model) -> Reply:
    return await environment.play(episode, model.access)


def is_async(environment: Any) -> bool:
    """verifiers runs many rollouts in one event loop itself, but one of its environments serves all of them with what
    `start` made, and here each episode starts and stops it."""
    return bool(getattr(environment, "shares", True))


def _has_legacy() -> bool:
    """Return whether this is a version before 0.4, which dropped environments without tasksets."""
    major, minor = importlib.metadata.version("verifiers").split(".")[:2]
    return (int(major), int(minor)) < (0, 4)
