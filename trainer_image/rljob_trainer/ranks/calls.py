"""Calls of Ray actors as futures of asyncio."""

import asyncio
from collections.abc import Sequence
from typing import Any


def future(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())


async def wait_for(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Wait until all calls have ended or one has failed. Return the errors."""
    if calls:
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    return find_errors(calls)


def find_errors(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Return the errors of the calls that have ended."""
    return [error for call in calls if call.done() and not call.cancelled() and (error := call.exception())]
