"""Environments of other projects, each through the adapter of its framework, which a plugin has.

Standard library only; an adapter imports its framework when it loads an environment.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from rljob_api.errors import UserError
from rljob_api.functions.plugins import load_reference
from rljob_service.worker.environments.base import Adapter, Model, Seat, import_name
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

    @property
    def list_rows(self) -> Callable[[str], Any] | None:
        """Returns the rows of a split; None if environments of this framework have none."""
        find = getattr(self.adapter, "rows", None)
        return None if find is None else partial(find, self.environment)

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


def check_seats(loaded: LoadedEnvironment, framework: str, wanted: Sequence[str] | None) -> None:
    """Raise UserError if an episode of the environment cannot train these seats. `wanted`: agent.seats.

    An adapter of environments with several players defines seats(environment), which returns them.
    """
    find = getattr(loaded.adapter, "seats", None)
    seats: Sequence[Seat] = () if find is None else find(loaded.environment)
    if wanted is None:
        if seats and not any(seat.plays_policy and seat.trains for seat in seats):
            raise UserError(
                f"agent.environment: no seat trains: none of its seats ({_list(seats)}) is played by the policy and "
                "trains; remove the model of one of them from agent.environment.args"
            )
        return
    if not seats:
        raise UserError(f"agent.seats: environments of {framework} have one player; remove it")
    by_name = {seat.name: seat for seat in seats}
    for name in wanted:
        if name not in by_name:
            raise UserError(f"agent.seats: {name} is not a seat of the environment; its seats are {_list(seats)}")
        if not by_name[name].plays_policy:
            raise UserError(
                f"agent.seats: {name} is played by another model; remove it, or remove its model and client from "
                "agent.environment.args"
            )
        if not by_name[name].trains:
            raise UserError(f"agent.seats: the environment excludes {name} from training; remove it")


def _list(seats: Sequence[Seat]) -> str:
    return ", ".join(seat.name for seat in seats)
