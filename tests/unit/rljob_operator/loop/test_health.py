"""When /healthz asks for a restart, and what /readyz answers."""

import aiohttp
import pytest

from rljob_operator.backend import JobKey
from rljob_operator.loop.health import STUCK_SECONDS, Health
from rljob_operator.loop.metrics import OperatorMetrics
from rljob_operator.loop.workqueue import WorkQueue

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


def test_health_reports_a_key_that_no_worker_takes(health, clock):
    health.queue.add(KEY)
    assert health.problem() == ""
    clock.now += STUCK_SECONDS + 1
    assert health.problem() == "the oldest key has waited for 121 s"


def test_health_reports_a_reconcile_that_does_not_end(health, clock):
    health.started_at[KEY] = clock.now
    clock.now += STUCK_SECONDS
    assert health.problem() == ""
    clock.now += 1
    assert health.problem() == "the reconcile of RLJob ns/a has taken 121 s"


def test_health_reports_stalled_watches(health):
    health.unconfirmed_write_seconds = lambda: STUCK_SECONDS + 1
    assert "the watches are stalled" in health.problem()


async def test_health_is_served_on_one_port(health, unused_tcp_port):
    health.not_ready_reason = "starting"
    health.queue.add(KEY)
    runner = await health.serve(unused_tcp_port, unused_tcp_port)
    base = f"http://127.0.0.1:{unused_tcp_port}"

    async def get(path):
        async with aiohttp.ClientSession() as session, session.get(base + path) as answer:
            return answer.status, await answer.text()

    assert await get("/readyz") == (503, "starting")
    health.is_ready = lambda: True
    assert await get("/readyz") == (200, "ok")
    assert await get("/healthz") == (200, "ok")
    health.unconfirmed_write_seconds = lambda: STUCK_SECONDS + 1
    assert (await get("/healthz"))[0] == 503
    assert "rljob_operator_queue_depth 1.0" in (await get("/metrics"))[1]
    await runner.cleanup()
