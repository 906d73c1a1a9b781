"""Simulates what these tests do not run: the workload controllers, the kubelets and the garbage collector.

Owns the Pods and the statuses of workloads, and deletes objects whose owners are deleted. One `step` is one round of
all controllers; it returns whether anything had to be done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kubernetes import client

from tests.integration.apiserver.admin_client import CHILD_KINDS, AdminClient, Manifest, owner_uids
from tests.integration.apiserver.job_oracle import is_ready

WORKLOADS = ("StatefulSet", "Deployment", "Job")
FOREGROUND = "foregroundDeletion"
FAILURES = {"crash": (1, "Error"), "user error": (78, "Error"), "oom": (137, "OOMKilled")}
NOW = "2026-01-01T00:00:00Z"


class ClusterSimulator:
    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    def step(self) -> bool:
        """Collect garbage, then create the Pods of workloads, then count them."""
        return self._collect_garbage() | self._create_pods() | self._count_pods()

    def pods(self) -> list[Manifest]:
        return self._admin.list("Pod")

    def set_ready(self, pod: Manifest) -> None:
        self._set_pod_status(pod, {"running": {"startedAt": NOW}}, ready=True)

    def fail(self, pod: Manifest, how: str) -> None:
        """End a container with a failure. It is restarted if its Pod allows."""
        code, reason = FAILURES[how]
        terminated = {"exitCode": code, "reason": reason, "message": f"error: {how}", "finishedAt": NOW}
        self._set_pod_status(pod, {"waiting": {"reason": "CrashLoopBackOff"}}, last={"terminated": terminated})

    def complete(self, job: Manifest) -> None:
        """End the head's Job successfully, as kube-controller-manager does."""
        conditions = [{"type": type_, "status": "True"} for type_ in ("SuccessCriteriaMet", "Complete")]
        status = {"conditions": conditions, "startTime": NOW, "completionTime": NOW, "succeeded": 1}
        self._admin.patch_status("Job", job["metadata"]["name"], status | {"uncountedTerminatedPods": {}})

    def _set_pod_status(
        self, pod: Manifest, state: Manifest, *, ready: bool = False, last: Manifest | None = None
    ) -> None:
        old = {s["name"]: s for s in pod.get("status", {}).get("containerStatuses") or []}
        statuses = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": ready,
                "restartCount": old.get(container["name"], {}).get("restartCount", 0) + (last is not None),
                "state": state,
                **({"lastState": last} if last else {}),
            }
            for container in pod["spec"]["containers"]
        ]
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        status = {"phase": "Running", "conditions": conditions, "containerStatuses": statuses}
        _unless_changed(self._admin.patch_status, "Pod", pod["metadata"]["name"], status)

    def _collect_garbage(self) -> bool:
        """Delete objects whose owners are all deleted. Finish a foreground deletion without dependents."""
        objects = [o for kind in ("RLJob", "RewardModel", *CHILD_KINDS, "Pod") for o in self._admin.list(kind)]
        uids = {o["metadata"]["uid"] for o in objects}
        collected = False
        for child in objects:
            metadata = child["metadata"]
            if (owners := owner_uids(child)) and not owners & uids:
                self._delete(child["kind"], metadata["name"])
                collected = True
            if FOREGROUND not in (metadata.get("finalizers") or []):
                continue
            dependents = [o for o in objects if metadata["uid"] in owner_uids(o)]
            for dependent in dependents:
                self._delete(dependent["kind"], dependent["metadata"]["name"])
            if not dependents:
                finalizers = [name for name in metadata["finalizers"] if name != FOREGROUND]
                change = {"metadata": {"uid": metadata["uid"], "finalizers": finalizers}}
                _unless_changed(self._admin.patch, child["kind"], metadata["name"], change)
            collected = True
        return collected

    def _delete(self, kind: str, name: str) -> None:
        _unless_changed(self._admin.delete, kind, name, gracePeriodSeconds=0)

    def _create_pods(self) -> bool:
        pods = {pod["metadata"]["name"]: pod for pod in self.pods()}
        changed = False
        for workload in [workload for kind in WORKLOADS for workload in self._admin.list(kind)]:
            wanted, uid = _wanted_pods(workload), workload["metadata"]["uid"]
            existing = {name for name, pod in pods.items() if uid == pod["metadata"]["ownerReferences"][0]["uid"]}
            if workload["kind"] == "Deployment":  # a rolling update recreates Pods of another digest
                digest = _digest(workload["spec"]["template"])
                wanted -= {name for name in existing if _digest(pods[name]) != digest}
            for name in sorted(existing - wanted):
                self._delete("Pod", name)
            for name in sorted(wanted - existing):
                _unless_changed(self._admin.create, _build_pod(workload, name))
            changed |= wanted != existing
        return changed

    def _count_pods(self) -> bool:
        pods, changed = self.pods(), False
        for deployment in self._admin.list("Deployment"):
            owned = [pod for pod in pods if deployment["metadata"]["uid"] in owner_uids(pod)]
            counts = {"replicas": len(owned), "readyReplicas": sum(map(is_ready, owned))}
            status = deployment.get("status") or {}
            if any(status.get(name, 0) != count for name, count in counts.items()):
                _unless_changed(self._admin.patch_status, "Deployment", deployment["metadata"]["name"], counts)
                changed = True
        return changed


def _wanted_pods(workload: Manifest) -> set[str]:
    if workload["metadata"].get("deletionTimestamp"):
        return set()
    if workload["kind"] == "Job" and workload.get("status", {}).get("conditions"):
        return set()
    replicas = workload["spec"].get("replicas", workload["spec"].get("parallelism", 1))
    return {f"{workload['metadata']['name']}-{index}" for index in range(replicas)}


def _build_pod(workload: Manifest, name: str) -> Manifest:
    template = workload["spec"]["template"]
    owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "controller": True}
    owner |= {key: workload["metadata"][key] for key in ("name", "uid")}
    metadata = {**template["metadata"], "name": name, "ownerReferences": [owner]}
    metadata.pop("creationTimestamp", None)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _digest(manifest: Manifest) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get("rljob.dev/config-hash"))


def _unless_changed(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Ignore that an object was deleted or recreated: the next round sees it, as with real controllers."""
    try:
        call(*arguments, **options)
    except client.ApiException as error:
        if error.status not in (404, 409):
            raise
