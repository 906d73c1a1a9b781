"""When /healthz asks for a restart, and what /readyz answers."""

import asyncio
import time

import aiohttp
import pytest

from rljob_api.manifest.status import RLJobStatus
from rljob_core.backend import JobKey
from rljob_core.loop.failures import RefusedStatus
from rljob_core.loop.workqueue import WorkQueue
from rljob_operator.health import STUCK_SECONDS, Health
from rljob_operator.metrics import OperatorMetrics
from tests.support.waiting import DEADLINE_SECONDS

KEY = JobKey("ns", "a")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    return Health(WorkQueue(), OperatorMetrics(), clock)


def test_health_reports_workers_that_take_no_key(health, clock):
    health.queue.add(KEY)
    assert health.problem() == ""
    clock.now += STUCK_SECONDS + 1
    assert health.problem() == "keys wait, and no reconcile has ended for 121 s"


def test_long_queue_is_healthy_while_reconciles_end(health, clock):
    """Killing the leader would start another one with the same queue."""
    for number in range(1000):
        health.queue.add(JobKey("ns", f"{number}"))
    for _ in range(500):
        key = health.queue.take(clock.now)
        with health.track_reconcile(key):
            clock.now += 1
        health.queue.finish(key)
        assert health.problem() == ""
    assert health.queue.oldest_age(clock.now) > 2 * STUCK_SECONDS
    clock.now += STUCK_SECONDS + 1
    assert "no reconcile has ended for 121 s" in health.problem()


def test_new_key_after_a_long_idle_time_is_healthy(health, clock):
    with health.track_reconcile(KEY):
        clock.now += 1
    clock.now += 10 * STUCK_SECONDS
    health.queue.add(KEY)
    assert health.problem() == ""


def test_health_reports_a_reconcile_that_does_not_end(health, clock):
    with health.track_reconcile(KEY):
        clock.now += STUCK_SECONDS
        assert health.problem() == ""
        clock.now += 1
        assert health.problem() == "the reconcile of RLJob ns/a has taken 121 s"
    assert health.problem() == ""


async def test_blocked_loop_is_measured(health, clock):
    measuring, read = asyncio.create_task(health.measure_stalls()), health.metrics.registry.get_sample_value
    await asyncio.sleep(0)
    clock.now += 3
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (count := read("rljob_operator_loop_stall_seconds_count")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0)
    measuring.cancel()
    assert read("rljob_operator_loop_stall_seconds_bucket", {"le": "2.0"}) == count - 1
    assert read("rljob_operator_loop_stall_seconds_bucket", {"le": "5.0"}) == count


def test_health_reports_stalled_watches():
    health = Health(WorkQueue(), OperatorMetrics(), unconfirmed_write_seconds=lambda: STUCK_SECONDS + 1)
    assert "the watches are stalled" in health.problem()


async def test_health_is_served_on_one_port(clock, unused_tcp_port):
    listed, ages = [], []
    health = Health(
        WorkQueue(),
        OperatorMetrics(),
        clock,
        has_listed=lambda: bool(listed),
        unconfirmed_write_seconds=lambda: max(ages, default=0.0),
    )
    health.queue.add(KEY)
    runner = await health.serve(unused_tcp_port, unused_tcp_port)
    base = f"http://127.0.0.1:{unused_tcp_port}"

    async def get(path):
        async with aiohttp.ClientSession() as session, session.get(base + path) as answer:
            return answer.status, await answer.text()

    assert await get("/readyz") == (503, "starting")
    health.wait_for("no CRD")
    assert await get("/readyz") == (503, "no CRD")
    health.stand_by()
    assert await get("/readyz") == (200, "ok")
    health.lead()
    assert await get("/readyz") == (503, "listing every kind for the first time")
    listed.append(True)
    assert await get("/readyz") == (200, "ok")
    health.refused_statuses = {KEY: RefusedStatus("uid", RLJobStatus(), "expected string, got false")}
    code, text = await get("/readyz")
    assert (code, text.startswith("the API server refuses the status of ")) == (503, True)
    assert text.endswith(": expected string, got false")
    assert "rljob_operator_refused_statuses 1.0" in (await get("/metrics"))[1]
    health.refused_statuses = {}
    assert await get("/healthz") == (200, "ok")
    ages.append(STUCK_SECONDS + 1)
    assert (await get("/healthz"))[0] == 503
    assert "rljob_operator_queue_depth 1.0" in (await get("/metrics"))[1]
    await runner.cleanup()
