"""Plays what no process of these tests is: the workload controllers, the kubelets and the garbage collector.

Owns Pods and statuses of what the operator made, and deletes what has lost its owner. One `play` is one round of all
controllers; it returns whether anything had to be done.
"""

from __future__ import annotations

from typing import Any

from direct_backend import CHILD_KINDS, DirectBackend
from kubernetes import client
from oracle import is_ready

Manifest = dict[str, Any]
WORKLOADS = ("StatefulSet", "Deployment", "Job")
FOREGROUND = "foregroundDeletion"
ENDS = {"crash": (1, "Error"), "user error": (78, "Error"), "oom": (137, "OOMKilled")}


class Player:
    def __init__(self, backend: DirectBackend, namespace: str) -> None:
        self._backend, self._namespace = backend, namespace

    def play(self) -> bool:
        """Collect garbage, then make the Pods that workloads want, and say how many there are."""
        return self._collect() | self._make_pods() | self._count_pods()

    def pods(self) -> list[Manifest]:
        return self._backend.list("Pod", self._namespace)

    def set_ready(self, pod: Manifest) -> None:
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        self._set_status(pod, "Running", state, ready=True)

    def end(self, pod: Manifest, how: str) -> None:
        """A container has ended with a failure, and runs again if its Pod may restart it."""
        code, reason = ENDS[how]
        terminated = {
            "exitCode": code,
            "reason": reason,
            "message": f"error: {how}",
            "finishedAt": "2026-01-01T00:00:00Z",
        }
        self._set_status(pod, "Running", {"waiting": {"reason": "CrashLoopBackOff"}}, last={"terminated": terminated})

    def complete(self, job: Manifest) -> None:
        """The head's Job has ended well, as kube-controller-manager would say it."""
        now = "2026-01-01T00:00:00Z"
        conditions = [{"type": type_, "status": "True"} for type_ in ("SuccessCriteriaMet", "Complete")]
        status = {
            "conditions": conditions,
            "startTime": now,
            "completionTime": now,
            "succeeded": 1,
            "uncountedTerminatedPods": {},
        }
        self._patch_status("Job", job["metadata"]["name"], status)

    def _set_status(
        self, pod: Manifest, phase: str, state: Manifest, *, ready: bool = False, last: Manifest | None = None
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
        status = {"phase": phase, "conditions": conditions, "containerStatuses": statuses}
        self._patch_status("Pod", pod["metadata"]["name"], status)

    def _patch_status(self, kind: str, name: str, status: Manifest) -> None:
        body = {"metadata": {"name": name}, "status": status}
        call = self._backend.resource(kind).status.patch
        _unless_gone(call, body=body, namespace=self._namespace, content_type="application/merge-patch+json")

    def _collect(self) -> bool:
        """Delete what has owners of which none exists; end a foreground deletion when all dependents are gone."""
        objects = [
            o
            for kind in ("RLJob", "RewardModel", *CHILD_KINDS, "Pod")
            for o in self._backend.list(kind, self._namespace)
        ]
        uids = {o["metadata"]["uid"] for o in objects}
        collected = False
        for child in objects:
            metadata = child["metadata"]
            if (owners := owners_of(child)) and not owners & uids:
                self._delete(child["kind"], metadata["name"])
                collected = True
            if FOREGROUND not in (metadata.get("finalizers") or []):
                continue
            dependents = [o for o in objects if metadata["uid"] in owners_of(o)]
            for dependent in dependents:
                self._delete(dependent["kind"], dependent["metadata"]["name"])
            if not dependents:
                self._let_go(child)
            collected = True
        return collected

    def _let_go(self, child: Manifest) -> None:
        metadata = child["metadata"]
        left = [name for name in metadata["finalizers"] if name != FOREGROUND]
        body = {"metadata": {"name": metadata["name"], "uid": metadata["uid"], "finalizers": left}}
        call = self._backend.resource(child["kind"]).patch
        _unless_gone(call, body=body, namespace=self._namespace, content_type="application/merge-patch+json")

    def _delete(self, kind: str, name: str) -> None:
        body = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        _unless_gone(self._backend.resource(kind).delete, name=name, namespace=self._namespace, body=body)

    def _make_pods(self) -> bool:
        pods = {pod["metadata"]["name"]: pod for pod in self.pods()}
        changed = False
        for kind in WORKLOADS:
            for workload in self._backend.list(kind, self._namespace):
                wanted = self._wanted_pods(workload)
                uid = workload["metadata"]["uid"]
                theirs = {n for n, p in pods.items() if uid == p["metadata"]["ownerReferences"][0]["uid"]}
                if kind == "Deployment":  # it rolls: what has another digest goes, and comes again
                    wanted -= {name for name in theirs if _digest(pods[name]) != _digest(workload["spec"]["template"])}
                for name in sorted(theirs - wanted):
                    self._delete("Pod", name)
                for name in sorted(wanted - theirs):
                    self._create_pod(workload, name)
                changed |= wanted != theirs
        return changed

    def _count_pods(self) -> bool:
        pods, changed = self.pods(), False
        for deployment in self._backend.list("Deployment", self._namespace):
            theirs = [pod for pod in pods if deployment["metadata"]["uid"] in owners_of(pod)]
            counts = {"replicas": len(theirs), "readyReplicas": sum(map(is_ready, theirs))}
            seen = deployment.get("status") or {}
            if any(seen.get(name, 0) != count for name, count in counts.items()):
                self._patch_status("Deployment", deployment["metadata"]["name"], counts)
                changed = True
        return changed

    @staticmethod
    def _wanted_pods(workload: Manifest) -> set[str]:
        if workload["metadata"].get("deletionTimestamp"):
            return set()
        if workload["kind"] == "Job" and workload.get("status", {}).get("conditions"):
            return set()
        replicas = workload["spec"].get("replicas", workload["spec"].get("parallelism", 1))
        return {f"{workload['metadata']['name']}-{index}" for index in range(replicas)}

    def _create_pod(self, workload: Manifest, name: str) -> None:
        template = workload["spec"]["template"]
        owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "controller": True}
        owner |= {key: workload["metadata"][key] for key in ("name", "uid")}
        metadata = {**template["metadata"], "name": name, "ownerReferences": [owner]}
        metadata.pop("creationTimestamp", None)
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        _unless_gone(self._backend.resource("Pod").create, body=body, namespace=self._namespace)


def _digest(of: Manifest) -> str:
    return str((of["metadata"].get("annotations") or {}).get("rljob.dev/config-hash"))


def owners_of(manifest: Manifest) -> set[str]:
    return {ref["uid"] for ref in manifest["metadata"].get("ownerReferences") or []}


def _unless_gone(call: Any, **arguments: Any) -> None:
    """What is gone, or has been made anew, is looked at in the next round, as controllers do."""
    try:
        call(**arguments)
    except client.ApiException as error:
        if error.status not in (404, 409):
            raise
