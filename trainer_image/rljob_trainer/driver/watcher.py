"""Run work under a watcher that raises when the work can no longer finish."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rljob_trainer.concurrency import end_tasks

_Result = TypeVar("_Result")


async def run_with_watcher(work: Coroutine[Any, Any, _Result], watcher: Coroutine[Any, Any, None]) -> _Result:
    """Run `work` until it ends or `watcher` raises; both then end. The watcher's error wins: it names the cause. A
    watcher that returns has nothing to report."""
    working, watching = asyncio.create_task(work), asyncio.create_task(watcher)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and not (working.done() and working.exception() is None):
            watching.result()
        return await working
    finally:
        await end_tasks(working, watching)
