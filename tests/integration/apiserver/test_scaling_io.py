"""Autoscaling on a real API server: drivers are asked, Deployments get their replicas, and the status says why.

The test plays the heads: Pods whose address is a driver of its own, which says what the test tells it to.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from manifests import put_all, smallest
from operator_world import Manifest, World, Writes

from rljob_api.wire.contract import PORT_DRIVER, UrlPath
from rljob_api.wire.protocol import DriverStatus, RewardDemand
from rljob_operator.kube.client import MERGE_PATCH, ApiError, connect

BURST = RewardDemand(
    samples=640, expected=640, is_open=True, due_seconds=40.0, window_seconds=40.0, latency_seconds=4.0
)
SCALED = {"autoscaling": {"minReplicas": 0, "maxReplicas": 50, "scaleDownAfterSeconds": 1}}
HEADS = {"one": "127.91.3.1", "two": "127.91.3.2"}
REFERENCE = {"rewards": [{"name": "r", "rewardModelRef": {"name": "math"}}]}


class Drivers:
    """What each address says at /status."""

    def __init__(self) -> None:
        self.said: dict[str, RewardDemand] = {}
        self.runners: list[web.AppRunner] = []

    async def start(self, address: str) -> None:
        async def status(_: web.Request) -> web.Response:
            said = DriverStatus(phase="generate", demand={"r": self.said.get(address, RewardDemand())})
            return web.Response(text=said.model_dump_json(), content_type="application/json")

        app = web.Application()
        app.router.add_get(UrlPath.STATUS.value, status)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, address, PORT_DRIVER).start()
        self.runners.append(runner)


@pytest.fixture
async def world(control_plane, namespace) -> AsyncIterator[World]:
    api = await connect(str(control_plane.kubeconfig))
    made = World(api, namespace, str(control_plane.kubeconfig))
    account = {"metadata": {"name": "default"}}
    await api.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", body=account)
    try:
        yield made
    finally:
        await made.stop()
        for kind, name in (*(("RLJob", name) for name in HEADS), ("RewardModel", "math")):
            with contextlib.suppress(ApiError):
                await made.delete(kind, name)
        await api.close()


@pytest.fixture
async def drivers() -> AsyncIterator[Drivers]:
    made = Drivers()
    for address in HEADS.values():
        await made.start(address)
    yield made
    for runner in made.runners:
        await runner.cleanup()


async def start_job(world: World, name: str, changes: Manifest) -> None:
    """A job whose head runs, as far as anybody can tell."""
    await world.create(put_all(smallest("RLJob", name), changes))

    async def head() -> Any:
        return await world.get("Job", f"{name}-head")

    template = copy.deepcopy((await world.until("the head's Job", head))["spec"]["template"])
    metadata = {key: template["metadata"].get(key, {}) for key in ("labels", "annotations")}
    spec = {"containers": [{"name": "head", "image": "none"}]}
    await world.create(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata | {"name": f"{name}-head-x"}, "spec": spec}
    )
    status = {"phase": "Running", "podIP": HEADS[name], "podIPs": [{"ip": HEADS[name]}]}
    path = f"{world.path('Pod', f'{name}-head-x')}/status"
    await world.api.request("PATCH", path, body={"status": status}, content_type=MERGE_PATCH)


async def replicas(world: World, name: str, wanted: int) -> Manifest:
    async def there() -> Manifest | None:
        found = await world.get("Deployment", name)
        return found if found and found["spec"]["replicas"] == wanted else None

    found: Manifest = await world.until(f"{wanted} replicas of {name}", there)
    return found


async def test_a_jobs_reward_is_scaled_before_its_burst_and_back(world, drivers):
    writes = Writes()
    await world.start(writes)
    await start_job(world, "one", {"rewards.0.name": "r", **{f"rewards.0.{k}": v for k, v in SCALED.items()}})
    await replicas(world, "one-reward-r", 0)
    drivers.said[HEADS["one"]] = BURST
    await replicas(world, "one-reward-r", 5)

    async def scaling() -> Any:
        return next(iter(((await world.get("RLJob", "one"))["status"].get("scaling")) or []), {}).get("slots")

    assert await world.until("the record", scaling) == 80
    record = (await world.get("RLJob", "one"))["status"]["scaling"][0]
    assert record["message"] == "wants 5: 640 samples x 4 s / 32 s = 80 slots of 16"
    assert record["lastScaleTime"].endswith("Z")
    drivers.said[HEADS["one"]] = RewardDemand()
    await replicas(world, "one-reward-r", 0)

    async def told() -> bool:
        return bool(await world.events("ScaledUp") and await world.events("ScaledDown"))

    await world.until("the events", told)
    assert len([write for write in writes.made if write.endswith("/one-reward-r") and "deployments" in write]) == 3


async def test_a_shared_models_replicas_are_for_all_of_its_jobs(world, drivers):
    await world.start()
    await world.create(put_all(smallest("RewardModel", "math"), SCALED))
    for name, address in HEADS.items():
        await start_job(world, name, REFERENCE)
        drivers.said[address] = BURST
    await replicas(world, "math-rewardmodel", 10)

    async def scaling() -> bool:
        said = await world.condition("Scaling", "RewardModel", "math")
        return (said.get("reason"), said.get("message")) == ("ScalingUp", "wants 10: 2 jobs need 80 + 80 slots of 16")

    await world.until("the condition, with both jobs in it", scaling)
    drivers.said.clear()
    await replicas(world, "math-rewardmodel", 0)

    async def rests() -> bool:
        return (await world.condition("Ready", "RewardModel", "math")).get("reason") == "ScaledToZero"

    await world.until("rest", rests)
