"""verifiers 0.4: Taskset and Env of `verifiers.v1`, which bring their loop and their client.

They get the gateway's address and key. Their dataset has the tasks: the row's `index` chooses one. Environments of
verifiers before 0.4 are refused. Standard library only.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rljob_api.errors import UserError
from rljob_plugins.verifiers import v1
from rljob_plugins.verifiers.v1 import V1Environment
from rljob_service.worker.environments.base import Model, Seat
from rljob_service.worker.episodes.types import Episode, Reply


def load(id: str, args: dict[str, Any]) -> V1Environment:
    version = importlib.metadata.version("verifiers")
    if tuple(map(int, version.split(".")[:2])) < (0, 4):
        raise UserError(
            f"agent.environment.packages: verifiers {version} has no tasksets; set verifiers==0.4.0, or a later one"
        )
    return v1.load(id, args)


def adopt(value: Any, args: dict[str, Any]) -> V1Environment:
    if not v1.is_taskset(value):
        raise UserError(
            f"{value!r} is not a Taskset of verifiers 0.4; environments of verifiers before 0.4 are not supported"
        )
    return v1.adopt(value, args)


def is_environment(name: str, value: Any) -> bool:
    return v1.is_taskset(value)


def seats(environment: V1Environment) -> Sequence[Seat]:
    return environment.seats


def rows(environment: V1Environment, split: str) -> Iterable[Mapping[str, Any]]:
    """Return the tasks of the environment's dataset."""
    return environment.rows(split)


async def play(environment: V1Environment, episode: Episode, model: Model) -> Reply:
    return await environment.play(episode, model.access)


def is_async(environment: V1Environment) -> bool:
    """verifiers runs many rollouts in one event loop itself, but one of its environments serves all of them with what
    `start` made, and here each episode starts and stops it."""
    return environment.shares
