"""The watchdog of the driver's event loop, in simulated time, and the loop's lag, which is what held it."""

import asyncio
import threading
import time

import pytest

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.head.watchdog import LoopWatchdog
from rljob_trainer.liveness.judge import Pace


class Process:
    """The process that the watchdog would end."""

    def __init__(self):
        self.now, self.message, self.ended = 0.0, "", threading.Event()
        self.lags = []

    def end(self, message):
        self.message = message
        self.ended.set()


@pytest.fixture
def process():
    return Process()


@pytest.fixture
def watchdog(process):
    bounds = HangDetection(min_seconds=30, max_seconds=60)
    times = {"period_seconds": 0.001, "turn_seconds": 0.001, "clock": lambda: process.now}
    return LoopWatchdog(Pace(bounds), process.end, process.lags.append, **times)


async def test_a_blocked_loop_ends_the_process_with_its_stacks(watchdog, process, capfd):
    async with watchdog.watching():
        await asyncio.sleep(0.05)
        while not process.ended.wait(0.001):  # blocks the loop
            process.now += 1
    assert process.message.startswith("the driver's event loop has not turned for ")
    assert "test_a_blocked_loop_ends_the_process_with_its_stacks" in capfd.readouterr().err


async def test_a_loop_that_turns_is_left_alone(watchdog, process):
    async with watchdog.watching():
        for _ in range(100):
            process.now += 1
            await asyncio.sleep(0.005)
    assert not process.ended.is_set()


async def test_what_holds_the_loop_is_observed_and_the_watch_ends(watchdog, process):
    async with watchdog.watching():
        await asyncio.sleep(0.01)
        time.sleep(0.2)  # noqa: ASYNC251 - this is what it measures
        await asyncio.sleep(0.01)
    assert max(process.lags) >= 0.2 - 0.01
    count = len(process.lags)
    await asyncio.sleep(0.01)
    assert len(process.lags) == count
