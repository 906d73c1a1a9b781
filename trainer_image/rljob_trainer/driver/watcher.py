"""Run work under a watcher that raises when the work can no longer finish."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_with_watcher(work: Coroutine[Any, Any, None], watcher: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or `watcher` raises; both then end. The watcher's error wins: it names the cause."""
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
