"""Run work under a watcher that raises when the work can no longer finish."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_with_watcher(work: Coroutine[Any, Any, None], watcher: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until `watcher` raises. Both have ended when this returns.

    If both fail, raise the watcher's error: it names the cause.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(watcher)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and not (working.done() and working.exception() is None):
            watching.result()
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
