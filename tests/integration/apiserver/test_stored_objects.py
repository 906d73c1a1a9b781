"""Objects that earlier CRDs stored, under the CRDs and the operator of this version, and back.

tests/data/upgrades has the CRDs of main at three commits, without descriptions; 9d265299 had those of 4f444b1d. A real
API server with the old CRDs stores the objects, with all of their defaults.
"""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest

from rljob_api.manifest.job import RLJob
from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.kube.client import SSA, ApiError, connect
from rljob_core.plan.job import render_children
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import Manifest, OperatorHarness
from tests.integration.apiserver.test_upgrade import CRDS, FORCED, read_crds
from tests.paths import ROOT

DATA = ROOT / "tests" / "data" / "upgrades"
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many": {"rollout.replicas": 3, "checkpoint.persistentVolumeClaim": {"claimName": "none"}},
    "auto": {"rewards.0.autoscaling": {"minReplicas": 2, "maxReplicas": 4, "targetSeconds": 1}},
    "susp": {"suspend": True},
}
FINISHED = [{"type": type_, "status": "True"} for type_ in ("SuccessCriteriaMet", "Complete")]


def load_crds(revision: str) -> list[Manifest]:
    found: list[Manifest] = json.loads(gzip.decompress((DATA / f"{revision}.json.gz").read_bytes()))
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory, loopback):
    folder = tmp_path_factory.mktemp("stored")
    with ControlPlane(folder, address=f"{loopback}.10", components=("etcd", "kube-apiserver")) as running:
        yield str(running.kubeconfig)


@pytest.fixture
async def cluster(server, request):
    """A namespace of its own: the CRDs of the next test would read its objects."""
    name = f"of-{request.node.callspec.id.split('-')[-1]}" if hasattr(request.node, "callspec") else "other"
    api = await connect(server)
    harness = OperatorHarness(api, name, server)
    await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    await api.request("POST", f"/api/v1/namespaces/{name}/serviceaccounts", body=account)
    await harness.create_claim("none")
    yield harness
    await harness.stop()
    for plural in ("rljobs", "rewardmodels"):
        await api.request("DELETE", f"/apis/rljob.dev/v1alpha1/namespaces/{name}/{plural}")
    await api.close()


async def install(harness: OperatorHarness, crds: list[Manifest]) -> None:
    """Install CRDs, and wait until the API server has those defaults."""
    for crd in crds:
        path = f"{CRDS}/{crd['metadata']['name']}"
        await harness.api.request("PATCH", path, query=FORCED, body=crd, content_type=SSA)
    jobs = next(crd for crd in crds if crd["spec"]["names"]["kind"] == "RLJob")
    properties = jobs["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    wanted = properties["checkpoint"]["properties"].get("export", {}).get("default")

    async def is_served() -> bool:
        try:
            answer = await harness.api.request(
                "POST", harness.path("RLJob"), query={"dryRun": "All"}, body=smallest(name="probe")
            )
        except ApiError as error:
            if error.code != 404:
                raise
            return False
        return bool((answer["spec"].get("checkpoint") or {}).get("export") == wanted)

    await harness.until("the CRDs are served", is_served)


async def finish_deletions(harness: OperatorHarness) -> list[str]:
    """Do what a garbage collector does; return the names of the workloads that stay."""
    stay = []
    for workload in await harness.workloads():
        kind, name = workload["kind"], workload["metadata"]["name"]
        if "foregroundDeletion" in (workload["metadata"].get("finalizers") or []):
            await harness.patch(kind, name, {"metadata": {"finalizers": None}})
        else:
            stay.append(name)
    return stay


async def until_workloads(harness: OperatorHarness, job: str, *roles: str) -> None:
    async def are_there() -> bool:
        found = {name for name in await finish_deletions(harness) if name.startswith(f"{job}-")}
        return found == {f"{job}-{role}" for role in roles}

    await harness.until(f"{roles} of {job}", are_there)


ROLES = ("head", "trainer", "rollout", "reward-correct")


async def end_head(harness: OperatorHarness, job: str) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = {"conditions": FINISHED, "startTime": now, "completionTime": now, "succeeded": 1}
    await harness.patch_status("Job", f"{job}-head", status)


async def write_as(harness: OperatorHarness, name: str, step: int) -> None:
    """Write an object in each way: its status as an operator does, an annotation, and its scale."""
    path = harness.path("RLJob", name)
    body = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}}
    status = {"status": {"progress": {"step": step}}}
    await harness.api.request("PATCH", f"{path}/status", query=FORCED, body=body | status, content_type=SSA)
    await harness.patch("RLJob", name, {"metadata": {"annotations": {"example.com/note": str(step)}}})
    await harness.api.request(
        "PATCH", f"{path}/scale", body={"spec": {"replicas": 2}}, content_type="application/merge-patch+json"
    )


@pytest.mark.parametrize("revision", ["c56f54c2", "4f444b1d"])
async def test_objects_of_an_earlier_version_live_on_and_go_back(cluster, revision):
    crds = load_crds(revision)
    await install(cluster, crds)
    for name, changes in JOBS.items():
        await cluster.create(put_all(smallest(name=name), changes))
    await cluster.create(smallest("RewardModel", "shared"))
    stored = await cluster.get("RLJob", "plain")
    assert stored["spec"]["checkpoint"]["export"] in (True, "last"), "with its defaults"

    await install(cluster, read_crds())
    kept = await cluster.get("RLJob", "plain")
    # Since then this default is by the plan; a stored one counts as a number that the job sets.
    before = put_all(smallest(name="plain"), {"trainer.microBatchTokens": 16384})
    assert RLJob.model_validate(kept).spec == RLJob.model_validate(before).spec
    await cluster.start(resync_seconds=0.4)
    for name in ("plain", "many", "auto"):
        await until_workloads(cluster, name, *ROLES)
        assert (await cluster.until_condition("Running", "False", name=name))["observedGeneration"] == 1
    await cluster.until_condition("Suspended", name="susp")
    await cluster.until_condition("Ready", "False", kind="RewardModel", name="shared")

    for name in ("plain", "susp"):
        await write_as(cluster, name, 3)
    await cluster.until("two rollouts", lambda: has_rollouts(cluster, "plain", 2))
    await cluster.patch("RLJob", "susp", {"spec": {"suspend": False}})
    await until_workloads(cluster, "susp", *ROLES)
    await cluster.patch("RLJob", "plain", {"spec": {"suspend": True}})
    await until_workloads(cluster, "plain")
    await cluster.until_condition("Suspended", name="plain")
    await cluster.patch("RLJob", "plain", {"spec": {"suspend": False}})
    await until_workloads(cluster, "plain", *ROLES)
    await end_head(cluster, "many")
    await cluster.until_condition("Succeeded", name="many")
    await until_workloads(cluster, "many", "head")
    body = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "spec": smallest()["spec"]}
    metadata = {key: kept["metadata"][key] for key in ("name",)}
    replaced = body | {
        "metadata": metadata | {"resourceVersion": (await cluster.get("RLJob", "plain"))["metadata"]["resourceVersion"]}
    }
    await cluster.api.request("PUT", cluster.path("RLJob", "plain"), body=replaced)
    await cluster.create(smallest(name="after"))
    await until_workloads(cluster, "after", *ROLES)
    assert not await cluster.events("StatusRefused")

    await cluster.stop()
    await install(cluster, crds)
    for name in (*JOBS, "after"):
        await write_as(cluster, name, 4)


@pytest.mark.parametrize("revision", ["b8d51035"])
async def test_objects_with_other_types_are_refused_with_the_way_out_and_end(cluster, revision, unused_tcp_port):
    await install(cluster, load_crds(revision))
    stored = await cluster.create(smallest(name="plain"))
    await install(cluster, read_crds())
    job = RLJob.model_validate(smallest(name="plain") | {"metadata": stored["metadata"]})
    for child in render_children(job, "token"):  # as the earlier operator made them
        if child["kind"] in WORKLOAD_KINDS:
            await cluster.create(child)
    await cluster.start(resync_seconds=0.4, health_port=unused_tcp_port)
    (event,) = await cluster.until_event("StatusRefused")
    assert "spec.trainer.compile must be one of auto, always, never, got false" in event["message"]
    assert "delete the object, correct the fields and apply it again" in event["message"]
    code, text = await ask_readyz(unused_tcp_port)
    assert (code, "the API server refuses the status of" in text) == (503, True)
    await until_workloads(cluster, "plain", *ROLES)
    await end_head(cluster, "plain")
    await until_workloads(cluster, "plain", "head")

    await cluster.delete("RLJob", "plain")
    await cluster.delete("Job", "plain-head")  # the garbage collector's part
    await cluster.create(smallest(name="plain"))
    await until_workloads(cluster, "plain", *ROLES)

    async def is_ready() -> bool:
        return await ask_readyz(unused_tcp_port) == (200, "ok")

    await cluster.until("a ready operator", is_ready)


async def ask_readyz(port: int) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as answer:
        return answer.status, await answer.text()


async def has_rollouts(harness: OperatorHarness, job: str, number: int) -> bool:
    found = await harness.get("Deployment", f"{job}-rollout")
    return bool(found and found["spec"]["replicas"] == number)
