"""The sleep of an engine that serves a model of its own, such as a reward's, next to a trainer.

It sleeps at level 1: its weights never change, so they wait in host memory, from where they return faster than from
files. Invariant: an engine that sleeps, or that waits for its last requests before it does, takes no further ones.
Those in flight end first: an answer that is cut off could be read as a score.
"""

import asyncio
import time
from typing import Any

from rljob_api.wire.weights import EngineMemory
from rljob_trainer.rollout.naps import NotWarmError, record_memory

_LEVEL = 1


class ModelNaps:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._is_warm = False
        self._is_asleep = False
        self.exclusive = asyncio.Lock()
        """Held while the engine's memory is changed."""

    def reason_not_ready(self) -> str:
        """Return why it gets no requests; empty if it may."""
        if not self._is_warm:
            return "the engine is warming up"
        return "the engine is asleep: it is the trainer's turn" if self._is_asleep else ""

    def record_warm(self) -> None:
        """The engine has answered its first request."""
        self._is_warm = True

    async def sleep(self) -> EngineMemory:
        """Refuse new requests, wait for those in flight, and free the engine's memory. Raise NotWarmError."""
        begin = self._begin()
        self._is_asleep = True
        async with self.exclusive:
            await self._engine.sleep(_LEVEL, mode="wait")
            return await self._measure("asleep", begin)

    async def wake(self) -> EngineMemory:
        """Get the memory back, and serve. Raise NotWarmError."""
        begin = self._begin()
        async with self.exclusive:
            if self._is_asleep:
                await self._engine.wake_up()
                self._is_asleep = False
            return await self._measure("awake", begin)

    def _begin(self) -> float:
        if not self._is_warm:
            raise NotWarmError(self.reason_not_ready())
        return time.perf_counter()

    async def _measure(self, what: str, begin: float) -> EngineMemory:
        return record_memory(what, sum(await self._engine.collective_rpc("rljob_memory")), begin)
