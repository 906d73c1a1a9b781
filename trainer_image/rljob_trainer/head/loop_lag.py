"""How late the driver's event loop runs what is due, for /metrics.

Everything of the driver is in one loop: a piece of work that holds it delays /status, the gateway and all rewards.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rljob_trainer.concurrency import end_tasks

PERIOD_SECONDS = 0.1


@asynccontextmanager
async def watching_lag(observe: Callable[[float], None], period: float = PERIOD_SECONDS) -> AsyncIterator[None]:
    """Within, call `observe` in each period with the seconds by which the loop was late."""
    task = asyncio.create_task(_watch(observe, period))
    try:
        yield
    finally:
        await end_tasks(task)


async def _watch(observe: Callable[[float], None], period: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period
        await asyncio.sleep(period)
        observe(max(0.0, loop.time() - due))
