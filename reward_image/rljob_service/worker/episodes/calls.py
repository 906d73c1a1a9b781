"""From a CallRequest to an episode that is played, and back: the fields, the environment variables, the signal. Or to
rows of what plays it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from rljob_api.wire.contract import READ_ROWS
from rljob_service.worker.episodes import reply
from rljob_service.worker.episodes.ending import Waiter
from rljob_service.worker.episodes.rows import List, RowReader
from rljob_service.worker.episodes.types import Access, Episode
from rljob_service.worker.episodes.variables import set_variables, use_variables
from rljob_service.worker.forms.binding import CallBinding

Play = Callable[[Episode, Waiter], Any]
"""Plays an episode and returns what user code returned."""


class Player(NamedTuple):
    """What plays episodes."""

    play: Play
    play_shared: Callable[[Episode], Awaitable[Any]] | None = None
    """The same among other episodes, in their event loop. None: it cannot."""
    alone: str = ""
    """Why it cannot, and what to do."""


def bind(player: Player, name: str, list_rows: List) -> CallBinding:
    """Bind what plays episodes; `name` is for errors. `list_rows`: raises UserError if it has no rows."""
    reader = RowReader(list_rows)

    def call(request: dict[str, Any]) -> Any:
        if _asks_for_rows(request):
            return reader.read(request["arguments"])
        episode = read_episode(request["arguments"])
        with set_variables(episode.access), Waiter() as waiter:
            return player.play(episode, waiter)

    async def call_shared(request: dict[str, Any]) -> Any:
        assert player.play_shared is not None
        if _asks_for_rows(request):
            import asyncio  # here, since other programs do not need it

            return await asyncio.to_thread(reader.read, request["arguments"])
        episode = read_episode(request["arguments"])
        with use_variables(episode.access):
            return await player.play_shared(episode)

    return CallBinding(
        call,
        lambda value, request: value if _asks_for_rows(request) else reply.read(value, name),
        call_shared=None if player.play_shared is None else call_shared,
        alone=player.alone,
    )


def _asks_for_rows(request: Mapping[str, Any]) -> bool:
    return request.get("function") == READ_ROWS


def read_episode(arguments: Mapping[str, Any]) -> Episode:
    """Return an episode from the fields of an EpisodeCall, which the server has checked."""
    access = arguments["model"]
    return Episode(
        id=arguments["episode"],
        attempt=arguments["attempt"],
        access=Access(access["url"], access["api_key"], access.get("name", "policy")),
        prompt=arguments["prompt"],
        ground_truth=arguments.get("ground_truth"),
        data_source=arguments.get("data_source", ""),
        columns=arguments.get("extra_info", {}),
        seed=arguments["seed"],
        max_turns=arguments["max_turns"],
        deadline_seconds=arguments["deadline_seconds"],
        seats=None if arguments.get("seats") is None else tuple(arguments["seats"]),
    )


def write_call(episode: Episode) -> dict[str, Any]:
    """Return the fields of an EpisodeCall."""
    return {
        "episode": episode.id,
        "attempt": episode.attempt,
        "model": episode.access._asdict(),
        "prompt": episode.prompt,
        "ground_truth": episode.ground_truth,
        "data_source": episode.data_source,
        "extra_info": episode.columns,
        "seed": episode.seed,
        "max_turns": episode.max_turns,
        "deadline_seconds": episode.deadline_seconds,
        "seats": None if episode.seats is None else list(episode.seats),
    }
