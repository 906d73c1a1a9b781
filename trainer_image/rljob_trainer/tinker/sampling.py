"""Samples of adapters, of which the rollouts hold one at a time.

    requests of one adapter --> run together --> the next in line needs another one --> all have ended --> publish it

Invariant: a request runs only while the rollouts hold its adapter. Requests start in the order in which they came.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rljob_api.wire.weights import WeightManifest
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.ranks.group import TrainerGroup
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.tinker import slot
from rljob_trainer.tinker.wire import Asked, RefusedError, write_sample

_NUM_SEEDS = 2**31


class Sampler:
    def __init__(self, group: TrainerGroup, generation: str, rollouts: RolloutClient, board: StatusBoard) -> None:
        """`generation`: of the weights that the group publishes."""
        self._group, self._generation, self._rollouts, self._board = group, generation, rollouts, board
        self._version = -1
        self._held: tuple[Path | None] | None = None
        """The adapter that the rollouts hold; None: it is not known."""
        self._num_running = 0
        self._line: list[object] = []
        """Who waits for their turn."""
        self._changed = asyncio.Condition()

    async def sample(self, adapter: Path | None, asked: Asked) -> bytes:
        """Return the answer of the wire. `adapter`: the folder of its files; None: the model without one."""
        async with self.holding(adapter):
            seed = random.randrange(_NUM_SEEDS) if asked.seed is None else asked.seed
            async with asyncio.TaskGroup() as group:
                prompt = group.create_task(self._score(asked))
                completions = [
                    group.create_task(
                        self._rollouts.complete(
                            asked.token_ids, asked.sampling, (seed + i) % _NUM_SEEDS, extra=asked.extra
                        )
                    )
                    for i in range(asked.num_samples)
                ]
        return write_sample([each.result() for each in completions], prompt.result(), asked.last_n)

    async def _score(self, asked: Asked) -> NDArray[np.float32] | None:
        if not asked.prompt_logprobs:
            return None
        if len(asked.token_ids) == 1:
            return np.zeros(0, np.float32)
        found = await self._rollouts.score(asked.token_ids)
        if found is None:
            raise RefusedError("prompt_logprobs: vLLM does not compute them for this prompt; see the rollout's log")
        return found

    @contextlib.asynccontextmanager
    async def holding(self, adapter: Path | None) -> AsyncIterator[None]:
        """Within, the rollouts hold the adapter."""
        turn = object()
        async with self._changed:
            self._line.append(turn)
            try:
                await self._changed.wait_for(
                    lambda: self._line[0] is turn and (self._held == (adapter,) or not self._num_running)
                )
                if self._held != (adapter,):
                    await self._publish(adapter)
                self._num_running += 1
            finally:
                self._line.remove(turn)
                self._changed.notify_all()
        try:
            yield
        finally:
            self._num_running -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _publish(self, adapter: Path | None) -> None:
        self._version += 1
        manifests = await self._group.call(slot.publish, adapter, self._generation, self._version)
        if manifests[0] is None:  # they may have been deleted while the ranks had other calls
            raise RefusedError("the sampler's weights are no longer kept; save_weights_for_sampler(NAME) keeps them")
        self._held = None
        manifest = WeightManifest.model_validate(manifests[0])
        self._rollouts.require(manifest)
        await self._board.announce(manifest)
        await self._rollouts.sync(manifest)
        self._held = (adapter,)
