"""Asks the ranks of a group how far they are, and passes on what they answer."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.actor import ActorHandle

from rljob_trainer.ranks.calls import find_errors, future
from rljob_trainer.ranks.rank_watch import RankWatch

_ANSWER_SECONDS = 0.2
"""For which a round waits for the answers. What comes later is read in the next one."""


class Heartbeats:
    def __init__(self, watch: RankWatch) -> None:
        self._watch = watch
        self._asked: dict[ActorHandle, asyncio.Future[Any]] = {}

    async def ask(self, ranks: Sequence[ActorHandle]) -> list[BaseException]:
        """Ask the ranks that have answered before, and read the answers. Return the errors: of ranks that have died."""
        errors = self._read(ranks)  # those that came since the last round
        for number, rank in enumerate(ranks):
            self._watch.record_asked(number)
            if rank not in self._asked:
                self._asked[rank] = future(rank.beat.remote())
                self._asked[rank].add_done_callback(_read_error)
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=_ANSWER_SECONDS)
        return errors + self._read(ranks)

    def _read(self, ranks: Sequence[ActorHandle]) -> list[BaseException]:
        done = [(number, self._asked.pop(rank)) for number, rank in enumerate(ranks) if self._is_done(rank)]
        for number, call in done:
            if not call.exception():
                self._watch.record_beat(number, call.result())
        return find_errors([call for _, call in done])

    def _is_done(self, rank: ActorHandle) -> bool:
        return rank in self._asked and self._asked[rank].done()


def _read_error(call: asyncio.Future[Any]) -> None:
    """Mark the error as read: who is killed after the last round never answers, and asyncio would log that."""
    if not call.cancelled():
        call.exception()
