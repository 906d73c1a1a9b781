from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from rljob_api.wire.base import InvalidReason
from rljob_service.models.metrics import UpstreamMetrics
from rljob_service.models.model_slots import ModelSlotPool
from rljob_service.models.rate_limiter import RateLimiter
from rljob_service.models.shared_engines import AwayError
from rljob_service.results import ExecutionResult, StartupReport
from tests.support.waiting import DEADLINE_SECONDS


class BrokenBackend:
    """Raises `error` from every call."""

    limiter = RateLimiter()
    can_serve = True
    enforces_timeout = False

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def required_wait(self) -> tuple[float, str]:
        return 0.0, ""

    async def start(self) -> StartupReport:
        return StartupReport()

    async def execute(self, body, progress):
        raise self.error

    async def close(self) -> None: ...


async def execute(error: BaseException) -> ExecutionResult:
    metrics = UpstreamMetrics(CollectorRegistry(), "test")
    pool = ModelSlotPool(BrokenBackend(error), metrics, 1, 60.0, on_idle=lambda: None)
    result: asyncio.Future[ExecutionResult] = asyncio.get_running_loop().create_future()
    pool.start(b"{}", 1, result.set_result)
    async with asyncio.timeout(DEADLINE_SECONDS):
        replies = await result
    await pool.close()
    return replies


async def test_execution_has_a_result_when_a_library_cancels_it():
    (reply,) = await execute(asyncio.CancelledError())
    assert reply.reason is InvalidReason.EXCEPTION


async def test_execution_whose_engines_are_away_is_not_an_attempt():
    (reply,) = await execute(AwayError("asleep"))
    assert (reply.reason, reply.message) == (InvalidReason.CANCELLED, "asleep")


async def test_execution_has_a_result_when_the_backend_has_a_bug():
    (reply,) = await execute(KeyError("x"))
    assert (reply.reason, reply.message) == (InvalidReason.EXCEPTION, "KeyError: 'x'")
