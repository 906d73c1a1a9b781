"""Two versions of a reward on a real API server: conditions from the first new Pod to the last old one, and no write
more than that takes. The test plays the Deployments' controller and the kubelets.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from manifests import INLINE, put_all, smallest
from operator_world import NAME, Lists, Manifest, World, Writes

from rljob_operator.kube.client import MERGE_PATCH, ApiError, connect

MODEL = "math"
NEW = INLINE.replace("1.0", "0.5")
OWNERS = {"RLJob": (NAME, f"{NAME}-reward-correct"), "RewardModel": (MODEL, f"{MODEL}-rewardmodel")}
"""By kind: its name, and its Deployment's."""
CONDITIONS = {"RLJob": "RewardVersionsMixed", "RewardModel": "Updating"}


@pytest.fixture
async def world(control_plane, namespace) -> AsyncIterator[World]:
    api = await connect(str(control_plane.kubeconfig))
    made = World(api, namespace, str(control_plane.kubeconfig))
    await api.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", body={"metadata": {"name": "default"}})
    try:
        yield made
    finally:
        await made.stop()
        for kind, (name, _) in OWNERS.items():
            with contextlib.suppress(ApiError):
                await made.delete(kind, name)
        await api.close()


async def deployment(world: World, kind: str, source: str) -> Manifest:
    """The Deployment, once it is the one for this source: its digest is another one then."""
    name = OWNERS[kind][1]

    async def there() -> Manifest | None:
        found, config = await world.get("Deployment", name), await world.get("ConfigMap", name)
        return found if found and config and source.splitlines()[1] in str(config["data"]) else None

    found: Manifest = await world.until(f"the Deployment of {kind}", there)
    return found


async def start_pod(world: World, made: Manifest, name: str) -> None:
    """A Pod of the Deployment as it is now, ready."""
    template = made["spec"]["template"]
    metadata = {key: template["metadata"][key] for key in ("labels", "annotations")}
    container = template["spec"]["containers"][0]
    spec = {"containers": [{key: container[key] for key in ("name", "image", "env")}]}
    await world.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata | {"name": name}, "spec": spec})
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    await world.api.request(
        "PATCH", f"{world.path('Pod', name)}/status", body={"status": status}, content_type=MERGE_PATCH
    )


async def stop_pod(world: World, name: str) -> None:
    await world.api.request("DELETE", world.path("Pod", name), body={"gracePeriodSeconds": 0})


async def said(world: World, kind: str, status: str, words: str = "") -> Manifest:
    async def says() -> Manifest | None:
        found = await world.condition(CONDITIONS[kind], kind, OWNERS[kind][0])
        return found if found.get("status") == status and words in found["message"] else None

    found: Manifest = await world.until(f"{CONDITIONS[kind]} {status} of {kind} with {words!r}", says)
    return found


@pytest.mark.parametrize("kind", ["RLJob", "RewardModel"])
async def test_while_two_versions_serve_a_condition_says_so_and_nothing_is_written_besides(world, kind):
    writes, lists = Writes(), Lists()
    await world.start(writes, lists, resync_seconds=1.0)
    path = "rewards.0.function.inline" if kind == "RLJob" else "function.inline"
    replicas = path.replace("function.inline", "replicas")
    name, of_pods = OWNERS[kind]
    stored = await world.create(put_all(smallest(kind, name), {replicas: 2}))
    old = await deployment(world, kind, INLINE)
    assert old["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0},
    }
    for pod in ("old-a", "old-b"):
        await start_pod(world, old, pod)
    await world.patch(kind, name, {"spec": put_all(stored, {path: NEW})["spec"]})
    new = await deployment(world, kind, NEW)

    async def rolled() -> Any:
        found = await world.get("Deployment", of_pods)
        return found if found["spec"]["template"] != old["spec"]["template"] else None

    new = await world.until("the new template", rolled)
    await start_pod(world, new, "new-a")
    message = (await said(world, kind, "True", "2 "))["message"]
    assert "1 ready Pod of version" in message or "2 ready Pods of version" in message
    await stop_pod(world, "old-a")
    await start_pod(world, new, "new-b")
    await stop_pod(world, "old-b")
    await said(world, kind, "False")
    begun, ended = ("VersionsMixed", "OneVersion") if kind == "RLJob" else ("NewVersionStarts", "Updated")

    async def told() -> bool:
        return bool(await world.events(ended))

    await world.until("the event of the end", told)
    assert sum(event["count"] for event in await world.events(begun)) == 1

    async def looked_twice(since: int) -> bool:
        return lists.num >= since + 3

    at_rest = lists.num
    await world.until("two looks", lambda: looked_twice(at_rest))
    before, at_rest = list(writes.made), lists.num
    await world.until("two more looks", lambda: looked_twice(at_rest))
    assert writes.made == before
