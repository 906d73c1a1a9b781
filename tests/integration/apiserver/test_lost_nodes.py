"""Pods that a lost node keeps, on a real API server: without a kubelet, a bound Pod stays in Terminating."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import aiohttp
import pytest

from rljob_core.backend import JobKey, utc_now
from rljob_core.kube.client import connect
from rljob_core.kube.resources import POD, RLJOB
from rljob_core.loop.reconcile import reconcile
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.driver import DriverClient
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness

NODE = "n1"
JOB_FINALIZER = "batch.kubernetes.io/job-tracking"
DECLARED_UNREADY = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]


async def lose_pod(harness: OperatorHarness, role: str, name: str, **metadata: Any) -> None:
    """A running Pod of a node that has disconnected, as the node controller leaves it."""
    labels = {"rljob.dev/job": NAME, "rljob.dev/role": role, "app.kubernetes.io/managed-by": "rljob-operator"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, **metadata},
        "spec": {"nodeName": NODE, "terminationGracePeriodSeconds": 60, "containers": [{"name": "a", "image": "a"}]},
    }
    await harness.create(pod)
    await harness.patch_status("Pod", name, {"phase": "Running", "conditions": DECLARED_UNREADY})
    await harness.delete("Pod", name)
    assert (await harness.get("Pod", name))["metadata"]["deletionTimestamp"], "no kubelet confirms its end"


async def reconcile_later(harness: OperatorHarness, backend: KubernetesBackend) -> None:
    """One reconcile of what the API server has now, as in an hour."""
    for resource, name in ((RLJOB, NAME), (POD, f"{NAME}-trainer-0"), (POD, f"{NAME}-head-x")):
        if found := await harness.get(resource.kind, name):
            backend.cache.upsert(resource.kind, found)
    await reconcile(backend, JobKey(harness.namespace, NAME), utc_now() + timedelta(hours=1))


@pytest.fixture
def backend(harness: OperatorHarness) -> KubernetesBackend:
    return KubernetesBackend(harness.api, Cache(), DriverClient())


async def test_pod_of_a_lost_node_is_named_and_stays_unless_the_user_chose_otherwise(harness, backend):
    await harness.create(smallest())
    await lose_pod(harness, "trainer", f"{NAME}-trainer-0")
    await reconcile_later(harness, backend)
    assert await harness.get("Pod", f"{NAME}-trainer-0")
    (event,) = await harness.events("NodeLost")
    assert f"trainer: Pod {NAME}-trainer-0 is stuck in Terminating on node {NODE}" in event["message"]
    assert event["message"] in (await harness.condition("Running"))["message"]


async def test_trainer_of_a_lost_node_is_deleted_by_force(harness, backend):
    await harness.create(put_all(smallest(), {"scheduling.forceDeleteAfterSeconds": 10}))
    await lose_pod(harness, "trainer", f"{NAME}-trainer-0")
    await reconcile_later(harness, backend)
    assert await harness.get("Pod", f"{NAME}-trainer-0") is None
    (event,) = await harness.events("ForceDeleted")
    assert f"deleted Pod {NAME}-trainer-0 of node {NODE} by force" in event["message"]
    assert await harness.events("NodeLost")


async def test_head_of_a_lost_node_is_a_failed_pod_that_its_job_may_replace(harness, backend):
    """With podReplacementPolicy: Failed, the Job controller keeps its finalizer until the phase is Failed."""
    await harness.create(put_all(smallest(), {"scheduling.forceDeleteAfterSeconds": 10}))
    await lose_pod(harness, "head", f"{NAME}-head-x", finalizers=[JOB_FINALIZER])
    await reconcile_later(harness, backend)
    pod = await harness.get("Pod", f"{NAME}-head-x")
    assert (pod["status"]["phase"], pod["metadata"]["deletionGracePeriodSeconds"]) == ("Failed", 0)
    (condition,) = [c for c in pod["status"]["conditions"] if c["type"] == "DisruptionTarget"]
    assert condition["status"] == "True", "podFailurePolicy ignores the failure"
    assert {c["type"] for c in pod["status"]["conditions"]} >= {"Ready", "ContainersReady"}, "the others stay"
    await reconcile_later(harness, backend)
    assert (await harness.events("ForceDeleted"))[0]["count"] == 1, "a second deletion has no effect"
    await harness.patch("Pod", f"{NAME}-head-x", {"metadata": {"finalizers": None}})
    assert await harness.get("Pod", f"{NAME}-head-x") is None


async def test_forced_deletion_that_fails_in_between_is_completed(harness, backend):
    class FailedDelete:
        async def __call__(self, request: aiohttp.ClientRequest) -> None:
            if request.method == "DELETE" and "/pods/" in request.url.path:
                raise aiohttp.ClientConnectionError("the connection is lost")

    await harness.create(put_all(smallest(), {"scheduling.forceDeleteAfterSeconds": 10}))
    await lose_pod(harness, "trainer", f"{NAME}-trainer-0")
    fault = FailedDelete()
    harness.api.hooks.append(fault)
    await reconcile_later(harness, backend)
    harness.api.hooks.remove(fault)
    assert (await harness.get("Pod", f"{NAME}-trainer-0"))["status"]["phase"] == "Failed"
    assert not await harness.events("ForceDeleted")
    await reconcile_later(harness, backend)
    assert await harness.get("Pod", f"{NAME}-trainer-0") is None


async def test_another_pod_of_the_same_name_is_not_deleted(harness, backend):
    await harness.create(put_all(smallest(), {"scheduling.forceDeleteAfterSeconds": 10}))
    await lose_pod(harness, "trainer", f"{NAME}-trainer-0")
    stale = await harness.get("Pod", f"{NAME}-trainer-0")
    await harness.delete("Pod", f"{NAME}-trainer-0", gracePeriodSeconds=0)
    await lose_pod(harness, "trainer", f"{NAME}-trainer-0")
    backend.cache.upsert(RLJOB.kind, await harness.get("RLJob", NAME))
    backend.cache.upsert(POD.kind, stale)
    await reconcile(backend, JobKey(harness.namespace, NAME), utc_now() + timedelta(hours=1))
    found = await harness.get("Pod", f"{NAME}-trainer-0")
    assert found["metadata"]["uid"] != stale["metadata"]["uid"]
    assert found["status"]["phase"] == "Running"
    assert not await harness.events("ForceDeleted")


@pytest.mark.parametrize("missing", ["delete pods", "patch pods/status"])
async def test_missing_right_is_in_the_status(harness, control_plane, missing):
    """The status says what to grant; the cause stays, and nothing else waits."""
    user = f"operator-{harness.namespace}"
    allowed: list[Manifest] = [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "create", "patch", "update"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]},
    ]
    if missing == "delete pods":
        allowed = allowed[:1]
    else:
        allowed[0] |= {"apiGroups": ["rljob.dev", "apps", "batch", "networking.k8s.io", "policy"]}
        allowed.append(allowed[0] | {"apiGroups": [""], "resources": ["secrets", "configmaps", "services", "events"]})
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{harness.namespace}"
    reference = {"apiGroup": "rbac.authorization.k8s.io"}
    metadata = {"name": "operator"}
    await harness.api.request("POST", f"{rbac}/roles", body={"metadata": metadata, "rules": allowed})
    binding = {"roleRef": reference | {"kind": "Role", "name": "operator"}, "metadata": metadata}
    binding["subjects"] = [reference | {"kind": "User", "name": user}]
    await harness.api.request("POST", f"{rbac}/rolebindings", body=binding)
    api = await connect(str(control_plane.kubeconfig_for(user, [])))
    harness.apis.append(api)
    backend = KubernetesBackend(api, Cache(), DriverClient())
    await harness.create(put_all(smallest(), {"scheduling.forceDeleteAfterSeconds": 10}))
    await lose_pod(harness, "trainer", f"{NAME}-trainer-0")

    async def is_reported() -> bool:  # RBAC takes effect after a moment
        await reconcile_later(harness, backend)
        return f"RBAC does not allow the operator to {missing}" in (await harness.condition("Running")).get(
            "message", ""
        )

    await harness.until("the missing right in the status", is_reported)
    assert "is stuck in Terminating" in (await harness.condition("Running"))["message"]
    assert await harness.get("Pod", f"{NAME}-trainer-0")
    assert await harness.get("StatefulSet", f"{NAME}-trainer"), "everything else continues"
