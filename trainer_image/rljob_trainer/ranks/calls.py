"""Calls of Ray actors as futures of asyncio, and what a group asks its ranks besides: how far they are, and their
stacks.

What a group that hangs can still say is bounded in time: who does not answer within some seconds has nothing to say.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any

from ray.actor import ActorHandle

from rljob_trainer.liveness.stacks import describe_process
from rljob_trainer.ranks.actor import PROCESS_NAME
from rljob_trainer.ranks.rank_watch import RankWatch


def future(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())


async def wait_for(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Wait until all calls have ended or one has failed. Return the errors."""
    if calls:
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    return find_errors(calls)


def find_errors(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Return the errors of the calls that have ended."""
    return [error for call in calls if call.done() and not call.cancelled() and (error := call.exception())]


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
        done = [
            (number, self._asked.pop(rank))
            for number, rank in enumerate(ranks)
            if rank in self._asked and self._asked[rank].done()
        ]
        for number, call in done:
            if not call.exception():
                self._watch.record_beat(number, call.result())
        return find_errors([call for _, call in done])


def _read_error(call: asyncio.Future[Any]) -> None:
    """Mark the error as read: who is killed after the last round never answers, and asyncio would log that."""
    if not call.cancelled():
        call.exception()


log = logging.getLogger(__name__)

_SECONDS = 5.0
_NUM_STACKS = 4
"""Ranks that wait for another one all have the same stack."""


async def log_stacks(ranks: Sequence[ActorHandle], hung: Collection[int], silent: Collection[int]) -> None:
    """Log the stacks of ranks, those that hang first."""
    answering = [rank for rank in sorted(range(len(ranks)), key=lambda rank: rank not in hung) if rank not in silent]
    chosen = answering[:_NUM_STACKS]
    stacks = await asyncio.gather(*(_ask(ranks[rank].dump_stacks.remote()) for rank in chosen))
    for rank, stack in zip(chosen, stacks, strict=True):
        log.error("rank %d %s, its stacks:\n%s", rank, "hangs" if rank in hung else "waits", stack or "it gives none")


async def describe_silent(
    ranks: Sequence[ActorHandle], process_ids: Sequence[int], addresses: Sequence[str], silent: Collection[int]
) -> str:
    """Return why the silent ranks give no stacks, as another rank of the same Pod sees it."""
    rank, state = min(silent), ""
    if rank < len(process_ids):
        pid, address = process_ids[rank], addresses[rank]
        peers = [peer for peer in range(len(ranks)) if peer not in silent and addresses[peer] == address]
        if peers:
            state = await _ask(ranks[peers[0]].describe_process.remote(pid))
        else:  # under `rljob run`, this process sees it, too
            state = describe_process(pid, PROCESS_NAME)
    return f"its process does not answer (state {state})" if state else "its process does not answer"


async def _ask(reference: Any) -> str:
    try:
        async with asyncio.timeout(_SECONDS):
            return str(await future(reference))
    except Exception:  # of any kind: it is about to be killed
        return ""
