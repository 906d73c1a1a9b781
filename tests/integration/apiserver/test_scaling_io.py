"""Autoscaling on a real API server: drivers report demand, Deployments are scaled, and the status explains it.

The test simulates the heads: Pods at whose addresses the test serves the driver's status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rljob_api.wire.contract import PORT_DRIVER, UrlPath
from rljob_api.wire.driver_status import DriverStatus, RewardDemand
from rljob_core.plan import autoscale
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import OperatorHarness, WriteRecorder

BURST = RewardDemand(
    samples=640, expected=640, is_open=True, due_seconds=40.0, window_seconds=40.0, latency_seconds=4.0
)
SCALED = {"autoscaling": {"minReplicas": 0, "maxReplicas": 50, "scaleDownAfterSeconds": 1}}
SCORES = "wants 5: 640 samples x 4 s / 32 s = 80 slots of 16"
SOURCE = {"inline": "def add(a: int) -> int: return a"}
LOOP = {
    "data.format": "chat",
    "agent": {"type": "loop", "tools": [{"name": "calc", "function": SOURCE, **SCALED}]},
}
PROGRAM = {"data.format": "chat", "agent": {"type": "program", "runner": {"function": SOURCE, **SCALED}}}
EPISODES = RewardDemand(samples=64, expected=64, is_open=True, holds_slots=True)
JOBS = ("one", "two")
REFERENCE = {"rewards": [{"name": "r", "rewardModelRef": {"name": "math"}}]}


class Drivers:
    """The drivers of JOBS, each at its own address."""

    def __init__(self, loopback: str) -> None:
        self.addresses = {name: f"{loopback}.{100 + number}" for number, name in enumerate(JOBS)}
        self.service = "r"
        """Whose demand they report."""
        self.demands: dict[str, RewardDemand] = {}
        self.runners: list[web.AppRunner] = []

    async def start(self, name: str) -> None:
        async def status(_: web.Request) -> web.Response:
            answer = DriverStatus(phase="generate", demand={self.service: self.demands.get(name, RewardDemand())})
            return web.Response(text=answer.model_dump_json(), content_type="application/json")

        app = web.Application()
        app.router.add_get(UrlPath.STATUS.value, status)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, self.addresses[name], PORT_DRIVER).start()
        self.runners.append(runner)


@pytest.fixture
async def drivers(loopback, monkeypatch) -> AsyncIterator[Drivers]:
    monkeypatch.setattr(autoscale, "IDLE_POLL_SECONDS", 0.5)
    monkeypatch.setattr(autoscale, "_MAX_SCALE_UPS_PER_LEAD", 600)
    created = Drivers(loopback)
    for name in JOBS:
        await created.start(name)
    yield created
    for runner in created.runners:
        await runner.cleanup()


async def until_replicas(harness: OperatorHarness, name: str, replicas: int) -> None:
    async def has_replicas() -> bool:
        found = await harness.get("Deployment", name)
        return bool(found and found["spec"]["replicas"] == replicas)

    await harness.until(f"{replicas} replicas of {name}", has_replicas)


@pytest.mark.parametrize(
    ("service", "changes", "burst", "replicas", "message"),
    [
        ("reward-r", {"rewards.0.name": "r", "rewards.0.autoscaling": SCALED["autoscaling"]}, BURST, 5, SCORES),
        ("agent-calc", LOOP, BURST, 5, SCORES.replace("samples", "episodes")),
        ("agent-runner", PROGRAM, EPISODES, 4, "wants 4: 64 episodes at once = 64 slots of 16"),
    ],
)
async def test_service_of_a_job_is_scaled_before_its_burst_and_back(
    harness, drivers, service, changes, burst, replicas, message
):
    recorder = WriteRecorder()
    await harness.start(recorder)
    drivers.service = service.partition("-")[2]
    await harness.start_job(put_all(smallest("RLJob", "one"), changes), drivers.addresses["one"])
    await until_replicas(harness, f"one-{service}", 0)
    drivers.demands["one"] = burst
    await until_replicas(harness, f"one-{service}", replicas)

    async def slots() -> Any:
        scaling = (await harness.get("RLJob", "one"))["status"].get("scaling") or []
        return next(iter(scaling), {}).get("slots")

    assert await harness.until("the record", slots) in (64, 80)
    record = (await harness.get("RLJob", "one"))["status"]["scaling"][0]
    assert (record["name"], record["message"]) == (drivers.service, message)
    assert record["lastScaleTime"].endswith("Z")
    drivers.demands["one"] = RewardDemand()
    await until_replicas(harness, f"one-{service}", 0)
    await harness.until_event("ScaledUp")
    await harness.until_event("ScaledDown")
    assert len([w for w in recorder.writes if w.endswith(f"/one-{service}") and "deployments" in w]) == 3


async def test_shared_models_replicas_cover_all_of_its_jobs(harness, drivers):
    await harness.start()
    await harness.create(put_all(smallest("RewardModel", "math"), SCALED))
    for name in JOBS:
        await harness.start_job(put_all(smallest("RLJob", name), REFERENCE), drivers.addresses[name])
    drivers.demands = dict.fromkeys(JOBS, BURST)
    await until_replicas(harness, "math-rewardmodel", 10)

    async def is_explained() -> bool:
        found = await harness.condition("Scaling", "RewardModel", "math")
        return (found.get("reason"), found.get("message")) == ("ScalingUp", "wants 10: 2 jobs need 80 + 80 slots of 16")

    await harness.until("the condition, with both jobs in it", is_explained)
    drivers.demands.clear()
    await until_replicas(harness, "math-rewardmodel", 0)

    async def is_scaled_to_zero() -> bool:
        return (await harness.condition("Ready", "RewardModel", "math")).get("reason") == "ScaledToZero"

    await harness.until("ScaledToZero", is_scaled_to_zero)
