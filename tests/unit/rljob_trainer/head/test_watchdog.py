"""The watchdog of the driver's event loop, in simulated time."""

import asyncio
import threading

import pytest

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.head.watchdog import LoopWatchdog


class Process:
    """The process that the watchdog would end."""

    def __init__(self):
        self.now, self.message, self.ended = 0.0, "", threading.Event()

    def end(self, message):
        self.message = message
        self.ended.set()


@pytest.fixture
def process():
    return Process()


@pytest.fixture
def watchdog(process):
    bounds = HangDetection(min_seconds=30, max_seconds=60)
    return LoopWatchdog(bounds, process.end, period_seconds=0.001, clock=lambda: process.now)


async def test_a_blocked_loop_ends_the_process_with_its_stacks(watchdog, process, capfd):
    with watchdog.watching():
        await asyncio.sleep(0.05)
        while not process.ended.wait(0.001):  # blocks the loop
            process.now += 1
    assert process.message.startswith("the driver's event loop has not turned for ")
    assert "test_a_blocked_loop_ends_the_process_with_its_stacks" in capfd.readouterr().err


async def test_a_loop_that_turns_is_left_alone(watchdog, process):
    with watchdog.watching():
        for _ in range(100):
            process.now += 1
            await asyncio.sleep(0.005)
    assert not process.ended.is_set()
