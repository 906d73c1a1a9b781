"""What a group that hangs can still say, for the log: the stacks of ranks that answer, the state of those that do not.

Bounded in time: who does not answer within some seconds has nothing to say.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any

from ray.actor import ActorHandle

from rljob_trainer.ranks.calls import future
from rljob_trainer.ranks.heartbeat import describe_process

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
        # Under `rljob run`, this process sees it, too.
        state = await _ask(ranks[peers[0]].describe_process.remote(pid)) if peers else describe_process(pid)
    return f"its process does not answer (state {state})" if state else "its process does not answer"


async def _ask(reference: Any) -> str:
    try:
        async with asyncio.timeout(_SECONDS):
            return str(await future(reference))
    except Exception:  # of any kind: it is about to be killed
        return ""
