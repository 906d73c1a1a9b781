"""Samples of adapters, of which the rollouts hold some at a time, each in a slot.

    request --> its adapter has a slot, or is published to one that nobody uses --> runs, with others of any slot

Invariant: a slot is filled only while no request uses it. Requests start in the order in which they came.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rljob_api.wire.weights import WeightManifest, slot_name
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.episodes.types import told_dtype
from rljob_trainer.ranks.group import TrainerGroup
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.tinker import slot as ranks
from rljob_trainer.tinker.wire import Asked, RefusedError, write_sample

_NUM_SEEDS = 2**31


@dataclass(eq=False)
class _Slot:
    """A place for an adapter in the rollouts."""

    number: int
    """From 1."""
    adapter: Path | None = None
    """None: nothing of use."""
    version: int = 0
    """The weights with which it got there."""
    num_running: int = 0


class Sampler:
    def __init__(
        self, group: TrainerGroup, generation: str, rollouts: RolloutClient, board: StatusBoard, num_slots: int
    ) -> None:
        """`generation`: of the weights that the group publishes. `num_slots`: of each rollout."""
        self._group, self._generation, self._rollouts, self._board = group, generation, rollouts, board
        self._version = -1
        self._slots = [_Slot(number) for number in range(1, num_slots + 1)]
        """The one that was used last is the last."""
        self._line: list[object] = []
        """Who waits for their turn."""
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Let the rollouts serve the model without an adapter."""
        self._line.insert(0, self)  # before samples that waited for these ranks
        await self._fill(self._slots[0], None)
        async with self._changed:
            self._line.remove(self)
            self._changed.notify_all()

    async def sample(self, adapter: Path | None, asked: Asked) -> bytes:
        """Return the answer of the wire. `adapter`: the folder of its files; None: the model without one."""
        async with self._holding(adapter) as wanted:
            seed = random.randrange(_NUM_SEEDS) if asked.seed is None else asked.seed
            async with asyncio.TaskGroup() as group:
                prompt = group.create_task(self._score(asked, wanted))
                completions = [
                    group.create_task(
                        self._rollouts.complete(
                            asked.token_ids, asked.sampling, (seed + i) % _NUM_SEEDS, extra=asked.extra, adapter=wanted
                        )
                    )
                    for i in range(asked.num_samples)
                ]
        return write_sample([each.result() for each in completions], prompt.result(), asked)

    async def _score(self, asked: Asked, wanted: Mapping[str, str]) -> NDArray[Any] | None:
        if not asked.prompt_logprobs and not asked.num_likeliest:
            return None
        if len(asked.token_ids) == 1:
            return np.zeros(0, told_dtype(asked.num_likeliest))
        found = await self._rollouts.score(asked.token_ids, asked.num_likeliest, adapter=wanted)
        if found is None:
            raise RefusedError("prompt_logprobs: vLLM does not compute them for this prompt; see the rollout's log")
        return found

    @contextlib.asynccontextmanager
    async def _holding(self, adapter: Path | None) -> AsyncIterator[Mapping[str, str]]:
        """Within, the rollouts hold the adapter. Yield the fields of a request that asks for it."""
        if adapter is None:
            yield {"cache_salt": self._generation}
            return
        turn, slot = object(), None
        self._line.append(turn)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._line[0] is turn and self._find_slot(adapter) is not None)
            slot = self._find_slot(adapter)
            assert slot is not None, "only the first in line takes one"
            slot.num_running += 1
            if slot.adapter != adapter:
                await self._fill(slot, adapter)  # without the lock, which those that end need
            self._slots.remove(slot)
            self._slots.append(slot)
            self._line.remove(turn)
            async with self._changed:
                self._changed.notify_all()
            # Blocks of the cache are of this adapter, whatever else is published meanwhile.
            yield {"model": slot_name(slot.number), "cache_salt": f"{self._generation}:{slot.version}"}
        finally:
            if slot is not None:
                slot.num_running -= 1
            self._line = [each for each in self._line if each is not turn]
            async with self._changed:
                self._changed.notify_all()

    def _find_slot(self, adapter: Path) -> _Slot | None:
        """Return the adapter's slot, else the one that nobody has used for longest; None if all are in use."""
        free = (slot for slot in self._slots if not slot.num_running)
        return next((slot for slot in self._slots if slot.adapter == adapter), next(free, None))

    async def _fill(self, slot: _Slot, adapter: Path | None) -> None:
        self._version += 1
        slot.adapter = None  # until it is known
        arguments = (len(self._slots), slot.number, adapter, self._generation, self._version)
        manifests = await self._group.call(ranks.publish, *arguments)
        if manifests[0] is None:  # they may have been deleted while the ranks had other calls
            raise RefusedError("the sampler's weights are no longer kept; save_weights_for_sampler(NAME) keeps them")
        manifest = WeightManifest.model_validate(manifests[0])
        self._rollouts.require(manifest)
        await self._board.announce(manifest)
        await self._rollouts.sync(manifest)
        slot.adapter, slot.version = adapter, self._version
