"""run_operator in this process with hooks on its requests, and the administrator's access to one namespace.

The test simulates controllers where it needs them. It waits for conditions of the cluster, with a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest

from rljob_core.kube.client import MERGE_PATCH, ApiError, KubeApi, connect
from rljob_core.kube.resources import BY_KIND, CLAIM, REWARD_MODEL, RLJOB
from rljob_operator import operator
from rljob_operator.operator import run_operator
from rljob_operator.settings import Settings
from rljob_operator.watch import informer
from tests.support.waiting import DEADLINE_SECONDS

POLL_SECONDS = 0.05
NAME = "smallest"
NODE = "n1"
READY = [{"type": "Ready", "status": "True"}]
Manifest = dict[str, Any]


@pytest.fixture
async def harness(control_plane, namespace, monkeypatch) -> AsyncIterator[OperatorHarness]:
    monkeypatch.setattr(operator, "_MIN_RECONCILE_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(informer, "_RELIST_SECONDS", 0.2)
    api = await connect(str(control_plane.kubeconfig))
    created = OperatorHarness(api, namespace, str(control_plane.kubeconfig))
    try:
        yield created
    finally:
        await created.stop()
        for resource in (RLJOB, REWARD_MODEL):  # a cluster-wide operator of a later test must not see them
            await api.request("DELETE", resource.path(namespace), body={"propagationPolicy": "Background"})
        await api.close()


class OperatorHarness:
    """One namespace, and the operators that `start` runs for it."""

    def __init__(self, api: KubeApi, namespace: str, kubeconfig: str) -> None:
        self.api, self.namespace, self.kubeconfig = api, namespace, kubeconfig
        self.tasks: list[asyncio.Task[None]] = []
        self.apis: list[KubeApi] = []

    async def start(self, *hooks: Any, **settings: Any) -> asyncio.Task[None]:
        api = await connect(settings.pop("kubeconfig", self.kubeconfig))
        api.hooks += hooks
        self.apis.append(api)
        defaults: Manifest = {"lease": False, "metrics_port": 0, "health_port": 0, "namespaces": (self.namespace,)}
        task = asyncio.create_task(run_operator(Settings(**(defaults | settings)), api=api))
        self.tasks.append(task)
        return task

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for api in self.apis:
            await api.close()

    def path(self, kind: str, name: str | None = None) -> str:
        return BY_KIND[kind].path(self.namespace, name)

    async def get(self, kind: str, name: str) -> Manifest | None:
        try:
            return await self.api.request("GET", self.path(kind, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def list(self, *kinds: str) -> list[Manifest]:
        items = []
        for kind in kinds:
            found = (await self.api.request("GET", self.path(kind)))["items"]
            items += [item | {"kind": kind} for item in found if item["metadata"]["name"] != "kube-root-ca.crt"]
        return items

    async def create_claim(self, name: str) -> None:
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        body = {"metadata": {"name": name}, "spec": spec}
        await self.api.request("POST", CLAIM.path(self.namespace), body=body)

    async def create(self, manifest: Manifest) -> Manifest:
        return await self.api.request("POST", self.path(manifest["kind"]), body=manifest)

    async def start_job(self, manifest: Manifest, address: str) -> None:
        """Create a job, and a running head Pod for it with this address."""
        name = (await self.create(manifest))["metadata"]["name"]
        head = await self.until("the head's Job", lambda: self.get("Job", f"{name}-head"))
        template = head["spec"]["template"]
        metadata = {key: template["metadata"].get(key, {}) for key in ("labels", "annotations")}
        pod = {
            "metadata": metadata | {"name": f"{name}-head-x"},
            "spec": {"containers": [{"name": "head", "image": "none"}]},
        }
        await self.create({"apiVersion": "v1", "kind": "Pod"} | pod)
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        await self.patch_status("Pod", f"{name}-head-x", status)

    async def patch(self, kind: str, name: str, change: Manifest) -> None:
        await self.api.request("PATCH", self.path(kind, name), body=change, content_type=MERGE_PATCH)

    async def patch_status(self, kind: str, name: str, status: Manifest) -> None:
        path = f"{self.path(kind, name)}/status"
        await self.api.request("PATCH", path, body={"status": status}, content_type=MERGE_PATCH)

    async def delete(self, kind: str, name: str, **options: Any) -> None:
        body = {"propagationPolicy": "Background", **options}
        await self.api.request("DELETE", self.path(kind, name), body=body)

    async def condition(self, type_: str, kind: str = "RLJob", name: str = NAME) -> Manifest:
        status = ((await self.get(kind, name)) or {}).get("status") or {}
        return next((c for c in status.get("conditions") or [] if c["type"] == type_), {})

    async def events(self, reason: str) -> list[Manifest]:
        return [item for item in await self.list("Event") if item["reason"] == reason]

    async def workloads(self) -> list[Manifest]:
        return await self.list("Job", "StatefulSet", "Deployment")

    async def until(self, what: str, holds: Callable[[], Awaitable[Any]]) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := await holds()):
            for task in self.tasks:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise AssertionError(f"the operator ended before {what}") from error
            assert time.monotonic() < deadline, f"never came: {what}; job: {await self.get('RLJob', NAME)}"
            await asyncio.sleep(POLL_SECONDS)
        return value

    async def until_condition(self, type_: str, status: str = "True", **owner: str) -> Manifest:
        async def has_status() -> Manifest | None:
            condition = await self.condition(type_, **owner)
            return condition if condition.get("status") == status else None

        condition: Manifest = await self.until(f"{type_} {status}", has_status)
        return condition

    async def until_event(self, reason: str) -> list[Manifest]:
        events: list[Manifest] = await self.until(f"an event {reason}", lambda: self.events(reason))
        return events

    async def until_deleted(self, kind: str, name: str) -> None:
        async def is_deleted() -> bool:
            return await self.get(kind, name) is None

        await self.until(f"the deletion of {kind} {name}", is_deleted)

    async def until_all_workloads(self, number: int = 4) -> None:
        async def exist() -> bool:
            return len(await self.workloads()) == number and bool(await self.condition("Running"))

        await self.until("all workloads", exist)

    async def until_recreated(self, kind: str, name: str, uid: str) -> None:
        async def is_recreated() -> bool:
            found = await self.get(kind, name)
            return bool(found and found["metadata"]["uid"] != uid)

        await self.until(f"{kind} {name}, recreated", is_recreated)

    async def delete_until_recreated(self, kind: str, name: str) -> None:
        found = await self.get(kind, name)
        assert found is not None
        await self.delete(kind, name)
        await self.until_recreated(kind, name, found["metadata"]["uid"])

    async def wait_for_resyncs(self, number: int = 3) -> None:
        """Wait for rounds of LISTs, each with a reconcile of every object, of the first operator."""
        lists = ListCounter()
        self.apis[0].hooks.append(lists)

        async def are_done() -> bool:
            return lists.num >= number

        await self.until(f"{number} resyncs", are_done)
        self.apis[0].hooks.remove(lists)


async def create_pods(harness: OperatorHarness, change: Callable[[Manifest], None] = lambda pod: None) -> list[str]:
    """Create one Pod of each role of the job, which no controller does here, and return their names. `change` does what
    a webhook for Pods would do."""
    roles = {"head": "Job", "trainer": "StatefulSet", "rollout": "Deployment", "reward-correct": "Deployment"}
    for role, kind in roles.items():
        workload = await harness.get(kind, f"{NAME}-{role}")
        assert workload is not None
        template = workload["spec"]["template"]
        metadata = template["metadata"] | {"name": f"{NAME}-{role}-0"}
        reference = {"apiVersion": workload["apiVersion"], "kind": kind, "name": workload["metadata"]["name"]}
        metadata["ownerReferences"] = [reference | {"uid": workload["metadata"]["uid"], "controller": True}]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        change(pod)
        await harness.create(pod)
    return [f"{NAME}-{role}-0" for role in roles]


async def make_ready(harness: OperatorHarness) -> None:
    """Create the Pods of the job, and report them as ready."""
    for pod in await create_pods(harness):
        await harness.patch_status("Pod", pod, {"phase": "Running", "conditions": READY})


async def start_pod(harness: OperatorHarness, kind: str, role: str) -> str:
    """Create the ready Pod of a workload, on a node, and return its name."""
    workload = await harness.get(kind, f"{NAME}-{role}")
    assert workload is not None
    owner = {"apiVersion": workload["apiVersion"], "kind": kind, "controller": True}
    owner |= {key: workload["metadata"][key] for key in ("name", "uid")}
    template, name = workload["spec"]["template"], f"{NAME}-{role}-0"
    metadata = {**template["metadata"], "name": name, "ownerReferences": [owner]}
    metadata.pop("creationTimestamp", None)
    spec = {**template["spec"], "nodeName": NODE}
    await harness.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    await set_status(harness, name, 0)
    return name


async def set_status(harness: OperatorHarness, name: str, restarts: int, conditions: Any = READY) -> None:
    pod = await harness.get("Pod", name)
    assert pod is not None
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    end = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": now}} if restarts else {}
    status = [
        {"name": c["name"], "image": "i", "imageID": "", "ready": True, "restartCount": restarts,
         "state": {"running": {}}, "lastState": end}
        for c in pod["spec"]["containers"]
    ]  # fmt: skip
    await harness.patch_status("Pod", name, {"phase": "Running", "conditions": conditions, "containerStatuses": status})


class WriteRecorder:
    """A hook that records writes. A dry run writes nothing."""

    def __init__(self) -> None:
        self.writes: list[str] = []

    async def __call__(self, request: aiohttp.ClientRequest) -> None:
        if request.method != "GET" and "dryRun" not in request.url.query:
            self.writes.append(f"{request.method} {request.url.path}")


class ListCounter:
    """A hook that counts LISTs, of jobs or of another kind."""

    def __init__(self, path: str = "/rljobs") -> None:
        self.num, self._path = 0, path

    async def __call__(self, request: aiohttp.ClientRequest) -> None:
        is_list = request.method == "GET" and "watch" not in request.url.query
        self.num += is_list and request.url.path.endswith(self._path)
