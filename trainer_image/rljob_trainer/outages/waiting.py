"""Runs work again until what it depends on is back. Other errors are raised at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rljob_trainer.outages.registry import Dependency

log = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS = 1.0, 30.0
_Result = TypeVar("_Result")


async def wait_out(
    dependency: Dependency, work: Callable[[], Awaitable[_Result]], explain: Callable[[Exception], str]
) -> _Result:
    """Return the result of `work`. `explain`: why an error is an outage; empty if it is none, and then it is raised.
    Raise OutageError after spec.outageSeconds."""
    delay = _FIRST_DELAY_SECONDS
    while True:
        try:
            result = await work()
        except Exception as error:
            if not (why := explain(error)):
                raise
            log.warning("%s is away, and is tried again in %.0f s: %s", dependency.what, delay, why)
            dependency.failed(why)
            dependency.check()
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY_SECONDS)
        else:
            dependency.succeeded()
            return result
