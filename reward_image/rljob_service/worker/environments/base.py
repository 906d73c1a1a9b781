"""The interface between the runner and the adapter of a framework: a module that the entry point of a plugin names.

An adapter owns how the environments of its project are made and played; the runner owns processes, timeouts, the
checks of replies and what happens after an exception: the episode fails with it. Standard library only.
"""

import importlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rljob_api.errors import UserError
from rljob_service.worker.episodes.types import Access, Episode, Message, Reply


class Answer(NamedTuple):
    """An answer of the policy."""

    id: str
    """Id of the completion: a key of Reply.rewards."""
    message: Message
    """role assistant, content, perhaps tool_calls."""
    finish_reason: str
    """stop, length or tool_calls."""


class RefusedError(Exception):
    """The gateway no longer answers requests like this one: the episode's limits are used up."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        """turn_limit, context_length_exceeded, ..."""


class Model(Protocol):
    """The policy: environments/model.py."""

    @property
    def access(self) -> Access:
        """For frameworks that bring their own client."""
        ...

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Answer:
        """Return the next answer. Raise RefusedError at a limit, OSError if the gateway cannot be reached."""
        ...


class Seat(NamedTuple):
    """A player of an environment's episodes."""

    name: str
    plays_policy: bool = True
    """False: another model plays it, as the environment's arguments say."""
    trains: bool = True
    """False: the environment itself excludes it from training."""


class Adapter(Protocol):
    """What the module of a framework defines. The group of its entry point is `rljob.environments`.

    Each worker imports it before the user's source, so that it may provide modules which that source imports. At its
    top it imports the standard library, rljob_api.functions and rljob_service.worker alone.
    """

    def load(self, id: str, args: dict[str, Any]) -> Any:
        """Return what an environment's id names in the framework, ready for `play`.

        Called once for each worker process, before its first episode. MODULE:NAME never comes here: `adopt` gets what
        it names. Raise UserError, with what to do, if there is no such environment.
        """
        ...

    def adopt(self, value: Any, args: dict[str, Any]) -> Any:
        """Return the user's class, function or object, ready for `play`. Called once, like `load`. Raise UserError if
        this framework cannot play it."""
        ...

    def is_environment(self, name: str, value: Any) -> bool:
        """Whether this name of the user's source is its environment, if function.entrypoint is null."""
        ...

    def play(self, environment: Any, episode: Episode, model: Model) -> Reply | Awaitable[Reply]:
        """Play one episode to its end; may be an async function. `environment` is what load or adopt returned. Release
        what the episode made, in a finally: the process plays the next one."""
        ...

    # Optional: def rows(environment: Any, split: str) -> Iterable[Mapping], the rows of a split for env:// sources, in
    # an order that does not change: a sequence, or an iterator, perhaps an endless one. The row of an episode has the
    # same columns. Raise UserError, with the splits that there are, for another one. Without it, environments have no
    # rows.
    #
    # Optional: def is_async(environment: Any) -> bool, whether one process may play several episodes of this
    # environment at once (episodesPerProcess). Then `play` is async and awaits whatever takes long, and keeps nothing
    # of an episode outside of itself. Without it, an episode has its process alone.


def import_name(path: str) -> Any:
    """Return what MODULE:NAME names. Raise UserError if it does not exist."""
    module, _, name = path.partition(":")
    try:
        value = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"agent.environment.id: {path}: {error}; add its package to agent.environment.packages"
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise UserError(f"agent.environment.id: {path}: {module} has no {name}; correct the name")
        value = getattr(value, part)
    return value
