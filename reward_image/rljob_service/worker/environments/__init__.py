"""Environments of other projects, each through the adapter of its framework, which a plugin has.

Standard library only; an adapter imports its framework when it loads an environment.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, NamedTuple, cast

from rljob_api.errors import UserError
from rljob_api.functions.plugins import load_reference
from rljob_service.worker.environments.base import Adapter, Model, import_name
from rljob_service.worker.episodes.types import Episode, Reply


class LoadedEnvironment(NamedTuple):
    """An environment with the adapter that plays it."""

    adapter: Adapter
    environment: Any

    @property
    def is_async(self) -> bool:
        """Whether a process can play several episodes at once."""
        decide = getattr(self.adapter, "is_async", None)
        return decide is not None and bool(decide(self.environment))

    def play(self, episode: Episode, model: Model) -> Reply | Awaitable[Reply]:
        return self.adapter.play(self.environment, episode, model)


def load_adapter(reference: str) -> Adapter:
    """Return the module of a framework. Raise UserError if it cannot be imported."""
    try:
        return cast(Adapter, load_reference(reference))
    except Exception as error:  # of the plugin
        what = f"the plugin {reference} cannot be imported: {type(error).__name__}: {error}"
        raise UserError(f"agent.environment.framework: {what}") from error


def make(adapter: Adapter, id: str, args: dict[str, Any]) -> LoadedEnvironment:
    """Return the environment that agent.environment.id names."""
    return adopt(adapter, import_name(id), args) if ":" in id else LoadedEnvironment(adapter, adapter.load(id, args))


def adopt(adapter: Adapter, value: Any, args: dict[str, Any]) -> LoadedEnvironment:
    """Return the user's own environment: the class, function or object of agent.runner.function."""
    return LoadedEnvironment(adapter, adapter.adopt(value, args))
