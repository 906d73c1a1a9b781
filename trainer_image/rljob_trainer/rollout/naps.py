"""The sleep of engines that share their devices with a trainer: on request, for the trainer's turn. A request may be
repeated.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from rljob_api.wire.weights import EngineMemory, RolloutWeights
from rljob_trainer.rollout.puller import ReplicaState
from rljob_trainer.rollout.weight_transfer import EngineLoader, Level

logger = logging.getLogger(__name__)


class NotWarmError(Exception):
    """The engine has not answered its first request."""


@dataclass
class Naps:
    """The sleep of a replica. Invariants: an engine that sleeps serves nothing, loads nothing, and reports no weights.
    It wakes for one version, and loads no older one.
    """

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


_LEVEL = 1


@dataclass
class ModelNaps:
    """The sleep of an engine that serves a model of its own, such as a reward's.

    It sleeps at level 1: its weights never change, so they wait in host memory, from where they return faster than from
    files. Invariant: an engine that sleeps, or that waits for its last requests before it does, takes no further ones.
    Those in flight end first: an answer that is cut off could be read as a score.
    """

    engine: Any
    is_warm: bool = False
    """Whether the engine has answered its first request."""
    _is_asleep: bool = False
    exclusive: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the engine's memory is changed."""

    def reason_not_ready(self) -> str:
        """Return why it gets no requests; empty if it may."""
        if not self.is_warm:
            return "the engine is warming up"
        return "the engine is asleep: it is the trainer's turn" if self._is_asleep else ""

    async def sleep(self) -> EngineMemory:
        """Refuse new requests, wait for those in flight, and free the engine's memory. Raise NotWarmError."""
        begin = self._begin()
        self._is_asleep = True
        async with self.exclusive:
            await self.engine.sleep(_LEVEL, mode="wait")
            return await self._measure("asleep", begin)

    async def wake(self) -> EngineMemory:
        """Get the memory back, and serve. Raise NotWarmError."""
        begin = self._begin()
        async with self.exclusive:
            if self._is_asleep:
                await self.engine.wake_up()
                self._is_asleep = False
            return await self._measure("awake", begin)

    def _begin(self) -> float:
        if not self.is_warm:
            raise NotWarmError(self.reason_not_ready())
        return time.perf_counter()

    async def _measure(self, what: str, begin: float) -> EngineMemory:
        return record_memory(what, sum(await self.engine.collective_rpc("rljob_memory")), begin)
