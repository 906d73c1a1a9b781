"""The lag of the event loop is what held it."""

import asyncio
import time

from rljob_trainer.head.loop_lag import watching_lag

HELD = 0.2


async def test_what_holds_the_loop_is_observed_and_the_watch_ends():
    observed = []
    async with watching_lag(observed.append, period=0.001):
        await asyncio.sleep(0.01)
        time.sleep(HELD)  # noqa: ASYNC251 - this is what it measures
        await asyncio.sleep(0.01)
    assert max(observed) >= HELD - 0.01
    count = len(observed)
    await asyncio.sleep(0.01)
    assert len(observed) == count
