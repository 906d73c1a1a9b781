"""The engine of a served model sleeps and wakes, and cuts no answer off."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rljob_trainer.rollout.naps import ModelNaps, NotWarmError

ASLEEP = "the engine is asleep: it is the trainer's turn"


class FakeEngine:
    """Records what vLLM is asked for."""

    def __init__(self) -> None:
        self.asked = list[Any]()
        self.drained = asyncio.Event()
        self.drained.set()

    async def sleep(self, level: int, mode: str) -> None:
        await self.drained.wait()
        self.asked.append(("sleep", level, mode))

    async def wake_up(self) -> None:
        self.asked.append("wake_up")

    async def collective_rpc(self, method: str) -> list[int]:
        return [3, 4]


def warm() -> tuple[ModelNaps, FakeEngine]:
    engine = FakeEngine()
    naps = ModelNaps(engine)
    naps.is_warm = True
    return naps, engine


async def test_engine_that_warms_up_neither_sleeps_nor_serves() -> None:
    naps = ModelNaps(FakeEngine())
    assert naps.reason_not_ready() == "the engine is warming up"
    for change in (naps.sleep, naps.wake):
        with pytest.raises(NotWarmError):
            await change()


async def test_requests_in_flight_end_before_it_sleeps_and_no_further_ones_begin() -> None:
    naps, engine = warm()
    engine.drained.clear()
    sleeping = asyncio.create_task(naps.sleep())
    await asyncio.sleep(0)
    assert naps.reason_not_ready() == ASLEEP
    waking = asyncio.create_task(naps.wake())
    engine.drained.set()
    assert (await sleeping).num_bytes == 7
    await waking
    assert engine.asked == [("sleep", 1, "wait"), "wake_up"]
    assert naps.reason_not_ready() == ""


async def test_changes_may_be_repeated() -> None:
    naps, engine = warm()
    assert (await naps.wake()).num_bytes == 7
    assert engine.asked == [], "it was awake"
    await naps.sleep()
    await naps.sleep()
    assert naps.reason_not_ready() == ASLEEP
