"""The operator's I/O on a real API server: run_operator in this process, with hooks on its requests."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from rljob_api.errors import TransientError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import SCHEDULING_GATE
from rljob_core.backend import Event
from rljob_core.kube.client import MERGE_PATCH
from rljob_core.kube.resources import POD
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.driver import DriverClient
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import (
    DEADLINE_SECONDS,
    NAME,
    ListCounter,
    Manifest,
    OperatorHarness,
    WriteRecorder,
)


@pytest.mark.parametrize("cluster_wide", [False, True])
async def test_deleted_child_is_recreated_and_edited_child_is_reverted(harness, cluster_wide):
    await harness.start(**({"namespaces": ()} if cluster_wide else {}))
    await harness.create(smallest())
    await harness.until_all_workloads()
    await harness.delete_until_recreated("Service", f"{NAME}-rollout")
    await harness.delete_until_recreated("Deployment", f"{NAME}-rollout")
    await harness.patch("StatefulSet", f"{NAME}-trainer", {"spec": {"replicas": 7}})

    async def is_reverted() -> bool:
        return (await harness.get("StatefulSet", f"{NAME}-trainer"))["spec"]["replicas"] == 1

    await harness.until("the StatefulSet as planned", is_reverted)


@pytest.mark.parametrize("label", ["rljob.dev/job", "app.kubernetes.io/managed-by"])
@pytest.mark.parametrize("value", ["another", None])
async def test_edited_label_of_a_child_is_reverted_without_a_due_reconcile(harness, label, value):
    lists = ListCounter()
    await harness.start(lists, resync_seconds=3600.0)
    await harness.create(put_all(smallest(), {"suspend": True}))  # its driver is not polled
    name = f"{NAME}-token"

    async def is_idle() -> Manifest | None:
        is_suspended = (await harness.condition("Suspended")).get("status") == "True"
        # The operator's LIST, kopf's, and the one after kopf's, which is the last before the next hour's.
        return await harness.get("Secret", name) if is_suspended and lists.num >= 3 else None

    before = await harness.until("the Secret", is_idle)
    await harness.patch("Secret", name, {"metadata": {"labels": {label: value}}})

    async def is_reverted() -> bool:
        labels = (await harness.get("Secret", name))["metadata"]["labels"]
        return bool(labels.get(label) == before["metadata"]["labels"][label])

    await harness.until("the label as planned", is_reverted)
    assert (await harness.get("Secret", name))["metadata"]["uid"] == before["metadata"]["uid"], "it is not recreated"


@pytest.mark.parametrize(
    ("kind", "suffix", "content"),
    [("ConfigMap", "config", {"data": {"mine": "yes"}}), ("Service", "head", {"spec": {"ports": [{"port": 80}]}})],
)
async def test_foreign_object_is_reported_once_and_never_changed(harness, kind, suffix, content):
    name, recorder = f"{NAME}-{suffix}", WriteRecorder()
    foreign = await harness.create({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **content})
    await harness.start(recorder, resync_seconds=0.4)
    await harness.create(smallest())
    conflict = await harness.until_condition("NameConflict")
    assert f"{kind} {name}" in conflict["message"]
    assert "delete it" in conflict["message"]
    assert len(await harness.until_event("ForeignObject")) == 1
    before = list(recorder.writes)
    await harness.wait_for_resyncs()
    assert recorder.writes == before, "reconciles of a settled job write nothing"
    found = await harness.get(kind, name)
    assert found["metadata"]["resourceVersion"] == foreign["metadata"]["resourceVersion"]
    assert await harness.workloads() == [], "no Pod may read another owner's configuration"
    await harness.delete(kind, name)
    await harness.patch("RLJob", NAME, {"metadata": {"labels": {"reconcile": "now"}}})
    await harness.until_all_workloads()
    await harness.until_condition("NameConflict", "False")


@pytest.mark.parametrize("label", ["app.kubernetes.io/managed-by", "rljob.dev/job"])
async def test_secret_that_lost_its_labels_is_found_again_with_its_token(harness, label):
    await harness.start(resync_seconds=0.4)
    await harness.create(smallest())
    await harness.until_all_workloads()
    before = await harness.get("Secret", f"{NAME}-token")
    uids = {w["metadata"]["uid"] for w in await harness.workloads()}
    await harness.patch("Secret", f"{NAME}-token", {"metadata": {"labels": {label: "another"}}})

    async def has_labels() -> bool:
        labels = (await harness.get("Secret", f"{NAME}-token"))["metadata"]["labels"]
        return bool(labels == before["metadata"]["labels"])

    await harness.until("its labels", has_labels)
    await harness.wait_for_resyncs()
    after = await harness.get("Secret", f"{NAME}-token")
    assert after["data"] == before["data"], "running Pods know no other token"
    assert {w["metadata"]["uid"] for w in await harness.workloads()} == uids, "a label restarts nothing"
    assert (await harness.condition("Failed"))["status"] == "False"


def build_backend(harness: OperatorHarness, cache: Cache | None = None) -> KubernetesBackend:
    return KubernetesBackend(harness.api, cache or Cache(), DriverClient())


async def test_repeated_event_increases_its_count(harness):
    job, backend = RLJob.model_validate(await harness.create(smallest())), build_backend(harness)
    for _ in range(3):
        await backend.record_event(job, Event("Warning", "Why", "because"))
    (event,) = await harness.events("Why")
    assert (event["count"], event["involvedObject"]["name"]) == (3, NAME)


@pytest.mark.parametrize("is_recreated", [False, True])
async def test_status_is_written_only_to_the_object_that_was_observed(harness, is_recreated):
    """Neither to a changed spec, nor to another job of the same name."""
    observed = RLJob.model_validate(await harness.create(smallest()))
    if is_recreated:
        await harness.delete("RLJob", NAME)
        await harness.create(smallest())
    else:
        await harness.patch("RLJob", NAME, {"spec": {"suspend": True}})
    backend = build_backend(harness)
    with pytest.raises(TransientError, match="409"):
        await backend.update_status(observed, RLJobStatus(observed_generation=7))
    assert "status" not in await harness.get("RLJob", NAME)
    now = RLJob.model_validate(await harness.get("RLJob", NAME))
    await backend.update_status(now, RLJobStatus(observed_generation=now.metadata.generation))
    assert (await harness.get("RLJob", NAME))["status"]["observedGeneration"] == now.metadata.generation


async def test_scheduling_gate_of_a_pod_is_removed_and_others_stay(harness):
    gates = [{"name": SCHEDULING_GATE}, {"name": "other.dev/gate"}]
    spec = {"containers": [{"name": "a", "image": "a"}], "schedulingGates": gates}
    pod = await harness.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    cache = Cache()
    cache.upsert(POD.kind, pod)
    await build_backend(harness, cache).ungate(harness.namespace, "p")
    assert (await harness.get("Pod", "p"))["spec"]["schedulingGates"] == gates[1:]


async def test_suspend_deletes_the_workloads_and_resume_recreates_them(harness):
    await harness.start()
    await harness.create(smallest())
    await harness.until_all_workloads()
    await harness.patch("RLJob", NAME, {"spec": {"suspend": True}})

    async def are_terminating() -> bool:
        # Foreground deletion waits for a garbage collector, which does not run here.
        found = await harness.workloads()
        return all("foregroundDeletion" in (w["metadata"].get("finalizers") or []) for w in found)

    await harness.until("the workloads under foreground deletion", are_terminating)
    old = {w["metadata"]["uid"] for w in await harness.workloads()}
    for workload in await harness.workloads():
        await harness.patch(workload["kind"], workload["metadata"]["name"], {"metadata": {"finalizers": None}})

    async def are_deleted() -> bool:
        return not await harness.workloads()

    await harness.until("the deletion of the workloads", are_deleted)
    await harness.patch("RLJob", NAME, {"spec": {"suspend": False}})
    await harness.until_all_workloads()
    assert old.isdisjoint(w["metadata"]["uid"] for w in await harness.workloads())


async def test_finished_job_is_deleted_after_its_time_to_live(harness):
    await harness.start()
    await harness.create(put_all(smallest(), {"ttlSecondsAfterFinished": 1}))
    await harness.until_all_workloads()
    now = "2026-01-01T00:00:00Z"
    conditions = [{"type": type_, "status": "True"} for type_ in ("SuccessCriteriaMet", "Complete")]
    status = {"conditions": conditions, "startTime": now, "completionTime": now, "succeeded": 1}
    await harness.patch_status("Job", f"{NAME}-head", status | {"uncountedTerminatedPods": {}})
    await harness.until_deleted("RLJob", NAME)


async def test_reward_model_gets_its_children_and_status(harness):
    await harness.start()
    await harness.create(smallest("RewardModel", "rm"))
    condition = await harness.until_condition("Ready", "False", kind="RewardModel", name="rm")
    assert condition["reason"] == "WaitingForPods"
    assert await harness.get("Deployment", "rm-rewardmodel")
    await harness.delete_until_recreated("Service", "rm-rewardmodel")


async def test_object_of_a_newer_crd_gets_an_event_and_no_write(harness, caplog, monkeypatch):
    from rljob_api.manifest.services.reward import RewardModel

    real = RewardModel.model_validate

    def reject(manifest: Any, **options: Any) -> RewardModel:
        return real(manifest | {"spec": manifest["spec"] | {"unheardOf": 1}}, **options)

    monkeypatch.setattr(RewardModel, "model_validate", reject)  # as a newer CRD's default does
    await harness.start()
    await harness.create(smallest("RewardModel", "rm"))
    (event,) = await harness.until_event("OutdatedOperator")
    assert "does not know spec.unheardOf; upgrade the operator: helm upgrade" in event["message"]
    assert "status" not in await harness.get("RewardModel", "rm")
    assert "Traceback" not in caplog.text


async def test_delete_that_no_watch_reported_is_found_by_the_resync(harness):
    async def hang_watch(request: aiohttp.ClientRequest) -> None:
        if "watch" in request.url.query and request.url.path.endswith("/services"):
            await asyncio.sleep(3600)

    await harness.start(hang_watch, resync_seconds=0.7)
    await harness.create(smallest())
    await harness.until_all_workloads()
    await harness.delete_until_recreated("Service", f"{NAME}-rollout")


async def test_resync_lists_no_warnings_and_keeps_those_that_the_watch_reported(harness):
    lists, warnings = ListCounter(), ListCounter("/events")
    await harness.start(lists, warnings, resync_seconds=0.4)
    await harness.create(smallest())
    await harness.until_all_workloads()

    async def has_cause() -> bool:
        return (await harness.condition("Running"))["reason"] == "FailedCreate"

    involved = {"kind": "Job", "namespace": harness.namespace, "name": f"{NAME}-head"}
    event = {"metadata": {"name": "denied"}, "involvedObject": involved, "type": "Warning", "reason": "FailedCreate"}
    await harness.create({"apiVersion": "v1", "kind": "Event", "message": "denied", **event})
    await harness.until("the cause", has_cause)
    await harness.wait_for_resyncs()
    before, num_rounds = (lists.num, warnings.num), 3
    for _ in range(num_rounds):
        await harness.wait_for_resyncs()
    assert lists.num >= before[0] + num_rounds
    # A watch that breaks off lists once, at any time.
    assert warnings.num < before[1] + num_rounds, "a cluster may have many thousands"
    assert await has_cause()


async def test_delete_between_our_list_and_kopfs_is_found_without_a_resync(harness):
    deleted, lists = asyncio.Event(), []

    async def delete_before_kopf_lists(request: aiohttp.ClientRequest) -> None:
        if request.url.path.endswith("/services") and request.method == "GET":
            lists.append(request.url)
            if len(lists) == 2:  # the first is the operator's
                await harness.delete("Service", f"{NAME}-rollout")
                deleted.set()

    first = await harness.start()
    await harness.create(smallest())
    await harness.until_all_workloads()
    uid = (await harness.get("Service", f"{NAME}-rollout"))["metadata"]["uid"]
    first.cancel()
    await asyncio.wait([first])
    await harness.start(delete_before_kopf_lists)
    await asyncio.wait_for(deleted.wait(), DEADLINE_SECONDS)
    await harness.until_recreated("Service", f"{NAME}-rollout", uid)


async def test_missing_rbac_verb_is_reported_as_event_until_granted(harness, control_plane):
    rules = [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["rljob.dev"], "resources": ["*"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["*"], "verbs": ["*"]},
    ]
    base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{harness.namespace}"
    role: Manifest = {"metadata": {"name": "r"}, "rules": rules}
    await harness.api.request("POST", f"{base}/roles", body=role)
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "weak"}
    binding = {"metadata": {"name": "r"}, "roleRef": ref, "subjects": [subject]}
    await harness.api.request("POST", f"{base}/rolebindings", body=binding)
    await harness.start(kubeconfig=str(control_plane.kubeconfig_for("weak")), resync_seconds=0.7)
    await harness.create(smallest())
    message = (await harness.until_event("Forbidden"))[0]["message"]
    assert "RBAC does not allow the operator to patch" in message
    assert "networkpolicies" in message or "poddisruptionbudgets" in message
    assert "grant that verb to its service account" in message
    rules.append({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]})
    await harness.api.request("PATCH", f"{base}/roles/r", body={"rules": rules}, content_type=MERGE_PATCH)
    await harness.until_all_workloads()


async def test_readiness_waits_for_the_first_lists(harness, unused_tcp_port):
    may_list = asyncio.Event()

    async def delay_lists(request: aiohttp.ClientRequest) -> None:
        if request.url.path.endswith("/services"):
            await may_list.wait()

    async def readiness() -> int:
        try:
            url = f"http://127.0.0.1:{unused_tcp_port}/readyz"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                return answer.status
        except aiohttp.ClientError:
            return 0

    await harness.start(delay_lists, health_port=unused_tcp_port)
    assert await harness.until("an answer", readiness) == 503
    may_list.set()

    async def is_ready() -> bool:
        return await readiness() == 200

    await harness.until("readiness", is_ready)
