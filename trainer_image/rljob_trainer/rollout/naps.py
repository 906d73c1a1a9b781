"""The sleep of a replica that shares its devices with a trainer: on request, for the trainer's turn.

Invariants: an engine that sleeps serves nothing, loads nothing, and reports no weights. It wakes for one version, and
loads no older one. A request may be repeated.
"""

import logging
import time
from dataclasses import dataclass

from rljob_api.wire.weights import EngineMemory, RolloutWeights
from rljob_trainer.rollout.puller import ReplicaState
from rljob_trainer.rollout.weight_transfer import EngineLoader, Level

logger = logging.getLogger(__name__)


class NotWarmError(Exception):
    """The engine has not answered its first request."""


@dataclass
class Naps:
    state: ReplicaState
    engine: EngineLoader
    level: Level

    async def sleep(self) -> EngineMemory:
        """Abort all requests, wait for a running load, and free the engine's memory. Raise NotWarmError."""
        begin = self._begin()
        self._fall_asleep()
        async with self.engine.exclusive:
            self._fall_asleep()
            await self.engine.sleep(self.level)
            return await self._measure("asleep", begin)

    async def wake(self, generation: str, version: int) -> EngineMemory:
        """Allocate the weights again. The puller loads this version once it is announced, or a newer one, and then
        wakes the cache. Raise NotWarmError."""
        begin, state = self._begin(), self.state
        async with self.engine.exclusive:
            if state.is_asleep:
                await self.engine.wake_weights(self.level)
            known = state.announced
            if known is not None and (known.generation != generation or known.version < version):
                known = None  # the head announces the version by now: this is from before
            state.record_change(is_asleep=False, wanted=(generation, version), announced=known)
            return await self._measure("awake", begin)

    def _begin(self) -> float:
        if not self.state.is_warm:
            raise NotWarmError(self.state.reason_not_ready())
        return time.perf_counter()

    def _fall_asleep(self) -> None:
        self.state.record_change(is_asleep=True, is_broken=False, error="", serving=RolloutWeights())

    async def _measure(self, what: str, begin: float) -> EngineMemory:
        return record_memory(what, await self.engine.measure(), begin)


def record_memory(what: str, num_bytes: int, begin: float) -> EngineMemory:
    """Return what an engine holds after a change that began at `begin`, of time.perf_counter(), and log it."""
    memory = EngineMemory(num_bytes=num_bytes, seconds=time.perf_counter() - begin)
    logger.info("%s after %.2f s, holds %.2f GiB", what, memory.seconds, memory.num_bytes / 2**30)
    return memory
