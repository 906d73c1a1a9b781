"""Environments of other projects, each through the adapter of its framework. `make` is the entry point of a runner.

Standard library only; an adapter imports its framework when it loads an environment.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable
from typing import Any, Final, NamedTuple, cast

from rljob_reward.worker.environments.base import Adapter, Model, import_name
from rljob_reward.worker.episodes.types import Episode, Reply

_MODULES: Final = {
    "verifiers": "verifiers",
    "openenv": "openenv",
    "skyrlGym": "skyrl_gym",
    "gymnasium": "gymnasium",
    "trl": "trl",
    "openrlhf": "openrlhf",
}
"""From agent.environment.framework to the module here."""


class LoadedEnvironment(NamedTuple):
    """An environment with the adapter that plays it."""

    adapter: Adapter
    environment: Any

    def play(self, episode: Episode, model: Model) -> Reply | Awaitable[Reply]:
        return self.adapter.play(self.environment, episode, model)


def prepare(framework: str) -> None:
    """Called before a source runs, or a module is imported, that has an environment."""
    if framework == "openrlhf":
        from rljob_reward.worker.environments.openrlhf_bases import provide_base_classes

        provide_base_classes()


def make(framework: str, id: str, args: dict[str, Any]) -> LoadedEnvironment:
    """Return the environment that agent.environment.id names."""
    adapter = find_adapter(framework)
    if ":" in id:
        prepare(framework)
        return adopt(framework, import_name(id), args)
    return LoadedEnvironment(adapter, adapter.load(id, args))


def adopt(framework: str, value: Any, args: dict[str, Any]) -> LoadedEnvironment:
    """Return the user's own environment: the class, function or object of agent.runner.function."""
    adapter = find_adapter(framework)
    return LoadedEnvironment(adapter, adapter.adopt(value, args))


def find_adapter(framework: str) -> Adapter:
    return cast(Adapter, importlib.import_module(f"{__name__}.{_MODULES[framework]}"))
