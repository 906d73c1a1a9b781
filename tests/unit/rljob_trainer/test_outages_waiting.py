"""Pauses between attempts, and a time limit that outages prolong."""

import asyncio
from itertools import islice

import pytest

from rljob_trainer.outages import deadline, double, pause
from tests.support.waiting import DEADLINE_SECONDS


def test_pauses_double_up_to_the_longest():
    assert list(islice(double(1, 5), 5)) == [1, 2, 4, 5, 5]
    assert pause(1, 60, 10**9) == 60


async def test_limit_ends_what_takes_longer():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(DEADLINE_SECONDS), deadline(0.01, lambda: 0.0) as scope:
            await asyncio.Event().wait()
    assert scope.expired()


async def test_outage_prolongs_the_limit_by_its_time_alone():
    loop, away = asyncio.get_running_loop(), [0.0]
    began, done = loop.time(), asyncio.Event()

    def is_away():
        away[0] = min(0.2, loop.time() - began)  # from the start on, for 0.2 s
        return away[0]

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(DEADLINE_SECONDS), deadline(0.05, is_away):
            await done.wait()
    assert away[0] == 0.2, "it has outlasted the outage"


async def test_work_in_time_leaves_no_timer():
    async with deadline(0.01, lambda: 0.0) as scope:
        pass
    await asyncio.sleep(0.05)
    assert not scope.expired()
