"""The reconcile core's Backend, straight on an API server: every look is a LIST, every write is counted and may fail.

For tests of the core against real defaulting, real server-side apply and real rules. It has no cache and no watch, so
nothing here speaks of those of rljob_operator.kube. Invariant: a fault strikes exactly one write, before or after it.
"""

from __future__ import annotations

import json
from typing import Any

from kubernetes import client, dynamic

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import LABEL_JOB
from rljob_api.wire.protocol import DriverStatus
from rljob_operator.backend import ChildKey, Event, ForeignObjectError, JobKey, Manifest, Observed, key_of
from rljob_operator.plan.observed_job import is_owned

API_VERSIONS = {
    "Secret": "v1",
    "ConfigMap": "v1",
    "Service": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "Job": "batch/v1",
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
    "Pod": "v1",
    "RLJob": "rljob.dev/v1alpha1",
    "RewardModel": "rljob.dev/v1alpha1",
}
CHILD_KINDS = tuple(API_VERSIONS)[:8]


class Killed(BaseException):
    """The operator died here: nothing of it runs any further."""


class DirectBackend:
    """Each fault of `faults` names what happens to the write of that number, counted from the backend's making:
    fail (not sent), lost (sent, the answer lost), conflict (409), kill (sent, then the operator dies)."""

    def __init__(self, api: dynamic.DynamicClient, faults: dict[int, str] | None = None) -> None:
        self._api, self._faults = api, faults or {}
        self.driver: DriverStatus | None = None
        self.writes: list[str] = []
        self.events: list[Event] = []

    def resource(self, kind: str) -> Any:
        return self._api.resources.get(api_version=API_VERSIONS[kind], kind=kind)

    async def get_job(self, key: JobKey) -> RLJob | None:
        found = self.find("RLJob", key.namespace, key.name)
        return RLJob.model_validate(found) if found else None

    async def observe(self, job: RLJob) -> Observed:
        namespace, selector = job.metadata.namespace, f"{LABEL_JOB}={job.metadata.name}"
        children = [child for kind in CHILD_KINDS for child in self.list(kind, namespace, selector)]
        pods = tuple(self.list("Pod", namespace, selector))
        return Observed({key_of(child): child for child in children}, pods, self.driver)

    async def apply(self, manifest: Manifest) -> None:
        kind, name = key_of(manifest)
        namespace = manifest["metadata"]["namespace"]
        held = self.find(kind, namespace, name)
        owner = manifest["metadata"]["ownerReferences"][0]
        if held and owner["uid"] not in {ref["uid"] for ref in held["metadata"].get("ownerReferences", [])}:
            raise ForeignObjectError(f"{kind} {namespace}/{name} is not this job's; delete it, or rename the job")
        options = {"field_manager": "rljob", "force_conflicts": True, "namespace": namespace, "name": name}
        self._write(f"apply {kind} {name}", lambda: self.resource(kind).server_side_apply(body=manifest, **options))

    async def delete(self, namespace: str, child: ChildKey) -> None:
        # Foreground would wait for a garbage collector, which no test runs.
        body = {"propagationPolicy": "Background"}
        call = self.resource(child.kind).delete
        self._write(f"delete {child.kind} {child.name}", lambda: call(name=child.name, namespace=namespace, body=body))

    async def ungate(self, namespace: str, pod: str) -> None:
        body = {"metadata": {"name": pod}, "spec": {"schedulingGates": None}}
        call = self.resource("Pod").patch
        self._write(
            f"ungate {pod}", lambda: call(body=body, namespace=namespace, content_type="application/merge-patch+json")
        )

    async def delete_job(self, key: JobKey) -> None:
        call = self.resource("RLJob").delete
        self._write(f"delete RLJob {key.name}", lambda: call(name=key.name, namespace=key.namespace))

    async def update_status(self, job: RLJob, status: Any) -> None:
        metadata = {"name": job.metadata.name, "namespace": job.metadata.namespace}
        metadata["resourceVersion"] = (job.metadata.model_extra or {})["resourceVersion"]
        stored = self.find("RLJob", job.metadata.namespace, job.metadata.name)
        if stored is None:
            return
        body = stored | {"metadata": stored["metadata"] | metadata, "status": status.to_manifest()}
        call = self.resource("RLJob").status.replace
        self._write("status", lambda: call(body=body, name=job.metadata.name, namespace=job.metadata.namespace))

    async def record_event(self, job: RLJob, event: Event) -> None:
        self.events.append(event)

    def find(self, kind: str, namespace: str, name: str) -> Manifest | None:
        try:
            return self.resource(kind).get(name=name, namespace=namespace).to_dict()  # type: ignore[no-any-return]
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Manifest]:
        answer = self.resource(kind).get(namespace=namespace, label_selector=selector, serialize=False)
        # Items of a typed list do not say what they are.
        return [item | {"kind": kind, "apiVersion": API_VERSIONS[kind]} for item in json.loads(answer.data)["items"]]

    def _write(self, what: str, call: Any) -> None:
        self.writes.append(what)
        fault = self._faults.pop(len(self.writes), "")
        if fault == "fail":
            raise TransientError(f"{what}: the API server did not answer")
        if fault == "conflict":
            raise TransientError(f"{what}: 409 Conflict")
        try:
            call()
        except client.ApiException as error:
            if error.status == 404 and what.startswith("delete"):
                return
            if error.status in (400, 422):
                raise UserError(f"{what}: {error.body}") from error
            raise TransientError(f"{what}: {error.status} {error.reason}") from error
        if fault == "kill":
            raise Killed(what)
        if fault == "lost":
            raise TransientError(f"{what}: the answer was lost")


def is_ours(job: RLJob, child: Manifest) -> bool:
    return is_owned(job, child)
