"""Programs that answer in the place of drivers, next to a healthy driver, and a driver that makes no step: the operator
on a real API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rljob_api.wire.contract import PORT_DRIVER
from rljob_api.wire.driver_status import DriverStatus, HungPart
from rljob_core.backend import DRIVER_UNREADABLE
from rljob_core.plan import job as plan_of_jobs
from rljob_operator.kube import driver, idle, progress
from tests.integration.apiserver.manifests import smallest
from tests.integration.apiserver.operator_harness import NAME, OperatorHarness, start_pod
from tests.support.hostile_drivers import PROBLEMS, Connection, serve

POLL_SECONDS = 0.5
NUM_POLLS = 10
"""Polls of the healthy driver while each of the others does its worst."""


@pytest.fixture
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (idle, progress, plan_of_jobs):
        monkeypatch.setattr(module, "PROGRESS_POLL_SECONDS", POLL_SECONDS)
    is_due = driver._Driver.is_due
    monkeypatch.setattr(driver._Driver, "is_due", lambda self, now, age: is_due(self, now, min(age, POLL_SECONDS)))
    monkeypatch.setattr(driver, "_MAX_POLL_SECONDS", 1.0)


class HealthyDriver:
    """Is one step further at each request."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def __call__(self, connection: Connection) -> None:
        self.num_requests += 1
        await connection.answer(DriverStatus(step=self.num_requests, phase="update").model_dump_json().encode())


@pytest.fixture
async def servers(loopback: str) -> AsyncIterator[Any]:
    """Return a function that serves a behaviour at a new address."""
    async with contextlib.AsyncExitStack() as stack:
        number = 100

        async def start(behaviour: Any) -> str:
            nonlocal number
            number += 1
            await stack.enter_async_context(serve(behaviour, address := f"{loopback}.{number}", PORT_DRIVER))
            return address

        yield start


@pytest.mark.usefixtures("_short_times")
async def test_hostile_drivers_are_named_and_cost_no_other_job_anything(harness: OperatorHarness, servers: Any) -> None:
    task, healthy = await harness.start(), HealthyDriver()
    await harness.start_job(smallest("RLJob", "healthy"), await servers(healthy))
    names = {behaviour.__name__.replace("_", "-"): problem for behaviour, problem in PROBLEMS.items()}
    addresses = [await servers(behaviour) for behaviour in PROBLEMS]
    await asyncio.gather(
        *(harness.start_job(smallest("RLJob", n), address) for n, address in zip(names, addresses, strict=True))
    )

    async def progress_of(name: str) -> Any:
        return ((await harness.get("RLJob", name) or {}).get("status") or {}).get("progress") or {}

    for name, problem in names.items():

        async def is_named(name: str = name, problem: str = problem) -> bool:
            reported = (await progress_of(name)).get("waitsFor", "")
            return bool(reported.startswith(DRIVER_UNREADABLE) and problem in reported)

        await harness.until(f"the problem of {name}", is_named)
    seen = healthy.num_requests

    async def is_polled() -> bool:
        return healthy.num_requests >= seen + NUM_POLLS and (await progress_of("healthy")).get("step", 0) >= seen

    await harness.until("the healthy job's progress", is_polled)
    assert not task.done()
    events = await harness.events("DriverUnreadable")
    # On a busy machine the healthy one may miss a poll: what counts is that nothing names it at the end.
    assert {event["involvedObject"]["name"] for event in events} >= names.keys()
    for name in names:
        assert (await harness.condition("Failed", name=name))["status"] == "False"
    assert not (await progress_of("healthy")).get("waitsFor")


class StalledDriver:
    """Answers with `status`, in which time passes."""

    def __init__(self) -> None:
        self.status = DriverStatus(step=3, total_steps=9, since_step_seconds=1, step_limit_seconds=60)

    async def __call__(self, connection: Connection) -> None:
        await connection.answer(self.status.model_dump_json().encode())
        passed = (self.status.since_step_seconds or 0.0) + POLL_SECONDS
        self.status = self.status.model_copy(update={"since_step_seconds": passed})


@pytest.mark.usefixtures("_short_times")
async def test_job_whose_driver_makes_no_step_says_who_hangs_until_it_makes_one(
    harness: OperatorHarness, servers: Any
) -> None:
    driver = StalledDriver()
    await harness.start()
    await harness.create(smallest())
    await harness.until_all_workloads()
    workloads = (
        ("Job", "head"),
        ("StatefulSet", "trainer"),
        ("Deployment", "rollout"),
        ("Deployment", "reward-correct"),
    )
    for kind, role in workloads:
        pod = await start_pod(harness, kind, role)
        if role == "head":
            address = await servers(driver)
            await harness.patch_status("Pod", pod, {"podIP": address, "podIPs": [{"ip": address}]})
    assert (await harness.until_condition("Progressing"))["reason"] == "StepFinished"
    step_time = (await harness.get("RLJob", NAME) or {})["status"]["progress"]["lastStepTime"]

    rank = HungPart(role="trainer", name="rank 3", seconds=70, limit_seconds=60, action="it is replaced")
    driver.status = driver.status.model_copy(update={"since_step_seconds": 70.0, "hung": [rank]})
    stalled = await harness.until_condition("Progressing", "False")
    assert stalled["reason"] == "ProgressDeadlineExceeded"
    assert "trainer: rank 3 hangs since" in stalled["message"]
    (event,) = await harness.until_event("ProgressDeadlineExceeded")
    assert (event["type"], event["message"]) == ("Warning", stalled["message"])
    assert (await harness.condition("Running"))["status"] == "True", "the operator acts on nothing"

    driver.status = DriverStatus(step=4, total_steps=9, since_step_seconds=0, step_limit_seconds=60)
    await harness.until_condition("Progressing")
    assert await harness.until_event("StepFinished")
    progress = (await harness.get("RLJob", NAME) or {})["status"]["progress"]
    assert progress["lastStepTime"] > step_time
    assert not progress.get("hung")
