"""Coroutines that run together and fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def run_all(work: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run all of `work` concurrently, and return the results. The first error cancels the rest; it is not wrapped."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
