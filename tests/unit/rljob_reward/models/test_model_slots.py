"""Slots that are coroutines: each execution ends with one verdict, whatever its call does."""

from __future__ import annotations

import asyncio

from rljob_api.wire.protocol import InvalidReason
from rljob_reward.models.model_slots import CallPool, OpenGate
from rljob_reward.results import ExecutionResult, StartupReport


class Broken:
    """A Caller whose calls end as cancelled though nobody cancelled them, as some libraries' do."""

    gate = OpenGate()
    can_serve = True
    enforces_timeout = False

    async def start(self) -> StartupReport:
        return StartupReport()

    async def call(self, body, progress):
        raise asyncio.CancelledError

    async def close(self) -> None: ...

    def record_wait(self, limit: str, seconds: float) -> None: ...


async def test_a_call_that_ends_without_an_answer_has_a_verdict_too():
    pool = CallPool(Broken(), 1, 60.0, on_idle=lambda: None)
    verdict: asyncio.Future[ExecutionResult] = asyncio.get_running_loop().create_future()
    pool.acquire().execute(b"{}", 1, verdict.set_result)
    async with asyncio.timeout(60):
        (reply,) = await verdict
    assert reply.reason is InvalidReason.EXCEPTION
    await pool.close()
