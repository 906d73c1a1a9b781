"""Backend for Kubernetes: reads come from the cache, writes are server-side applies of one field manager.

Leaves decisions to plan and filling the cache to `watch`. Invariants: an object of another owner is never written;
a delete has the observed uid as its precondition.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from http import HTTPStatus
from typing import Any

from rljob_api import API_VERSION
from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import POLICY_NAME
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.contract import MANAGED_BY, SCHEDULING_GATE
from rljob_core.backend import (
    DEMAND_POLL_SECONDS,
    PROGRESS_POLL_SECONDS,
    ChildKey,
    Demand,
    DriverAnswer,
    Event,
    ForeignObjectError,
    InvalidOwnerError,
    JobKey,
    Key,
    Manifest,
    ObservedState,
    Owner,
    OwnerStatus,
    Reference,
    RewardModelKey,
    StartJob,
    UnknownFieldsError,
    key_of,
    utc_now,
)
from rljob_core.children.config import read_token
from rljob_core.children.start_model import parse_start
from rljob_core.kube.client import MERGE_PATCH, SSA, STRATEGIC_MERGE_PATCH, ApiError, KubeApi
from rljob_core.kube.resources import BY_KIND, EVENT, POD, POLICY, REWARD_MODEL, RLJOB, Resource
from rljob_core.plan.apply_scaling import is_autoscaled, read_demands
from rljob_core.plan.start_model import read_start_job
from rljob_operator.kube.cache import Cache, ObjectKey, newest_warnings
from rljob_operator.kube.driver import DriverClient, find_driver
from rljob_operator.kube.driver_request import DriverEndpoint
from rljob_operator.kube.manifests import read_job, read_model, read_policy
from rljob_operator.kube.preflight import CREATE_ONLY, Preflight
from rljob_operator.kube.progress import ProgressReports
from rljob_operator.kube.refusals import is_conflict, translate

_FORCED = {"fieldManager": MANAGED_BY, "force": "true"}
_FOREGROUND_KINDS = ("Job", "StatefulSet", "Deployment")
"""Deleted after their Pods."""


class KubernetesBackend:
    """Implements Backend. `may_write` is called before each write: only the leader may.

    `on_read` gets each object that a reconcile starts with, or None if it was deleted. It gets it again after a write
    of its status, since the operator's own writes cause no reconcile.
    """

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        driver: DriverClient,
        *,
        may_write: Callable[[], bool] = lambda: True,
        now: Callable[[], datetime] = utc_now,
        clock: Callable[[], float] = time.monotonic,
        on_read: Callable[[Key, Owner | None], None] = lambda key, owner: None,
    ) -> None:
        self.api, self.cache, self.driver = api, cache, driver
        self._may_write, self._now, self._on_read = may_write, now, on_read
        self._progress = ProgressReports(clock)
        self._foreign: set[tuple[str, str, str]] = set()
        self._preflight = Preflight(self._call, clock)

    async def get_owner(self, key: Key) -> Owner | None:
        resource, read = (RLJOB, read_job) if isinstance(key, JobKey) else (REWARD_MODEL, read_model)
        manifest = self.cache.get(resource.kind, key.namespace, key.name)
        if manifest and resource is REWARD_MODEL and manifest["metadata"].get("deletionTimestamp"):
            manifest = None
        try:
            owner = read(manifest) if manifest else None
        except InvalidOwnerError as error:
            self._on_read(key, error.owner)
            raise
        self._on_read(key, owner)
        return owner

    async def observe(self, owner: Owner) -> ObservedState:
        observed = self._observe_owned(ObjectKey(owner.kind, owner.metadata.namespace, owner.metadata.name))
        if "spec" not in owner.model_fields_set:
            return observed  # nothing else is known of an unreadable object
        policy, problem = read_policy(self.cache.get(POLICY.kind, owner.metadata.namespace, POLICY_NAME))
        observed = replace(observed, policy=policy, policy_problem=problem)
        if not isinstance(owner, RLJob):
            return replace(observed, demands=await self._observe_demands(owner))
        max_age = DEMAND_POLL_SECONDS if is_autoscaled(owner) else PROGRESS_POLL_SECONDS
        key = JobKey(owner.metadata.namespace, owner.metadata.name)
        answer = await self.get_driver_answer(find_driver(owner, observed), key, max_age)
        models = self._find_models(owner)
        return replace(
            observed,
            driver=answer.status,
            driver_problem=answer.problem,
            reward_models=models,
            start_job=self._find_start_job(owner),
        )

    async def get_driver_answer(
        self, driver: DriverEndpoint | None, key: Key, max_age_seconds: float = PROGRESS_POLL_SECONDS
    ) -> DriverAnswer:
        """Return what the plan may see of a driver's answer: its progress only when a report is due."""
        answer = await self.driver.get_status(driver, key, max_age_seconds)
        return self._progress.report(key, driver.pod_uid if driver else "", answer)

    def _observe_owned(self, owner: ObjectKey) -> ObservedState:
        objects = self.cache.owned(owner)
        return ObservedState(
            children={key_of(o): o for o in objects if o["kind"] not in (POD.kind, EVENT.kind)},
            pods=tuple(o for o in objects if o["kind"] == POD.kind),
            warnings=newest_warnings(o for o in objects if o["kind"] == EVENT.kind),
        )

    def _find_models(self, job: RLJob) -> dict[str, RewardModel]:
        models = {}
        for name in sorted({r.reward_model_ref.name for r in job.spec.rewards if r.reward_model_ref}):
            manifest = self.cache.get(REWARD_MODEL.kind, job.metadata.namespace, name)
            with contextlib.suppress(InvalidOwnerError, UnknownFieldsError):  # its own status reports the problems
                if manifest is not None:
                    models[name] = read_model(manifest)
        return models

    def _find_start_job(self, job: RLJob) -> StartJob | None:
        start = parse_start(job)
        return read_start_job(self.cache.get(RLJOB.kind, job.metadata.namespace, start.path)) if start else None

    async def _observe_demands(self, model: RewardModel) -> tuple[Demand, ...]:
        """Return the demand of each job of the namespace that references the model."""
        own_key = RewardModelKey(model.metadata.namespace, model.metadata.name)
        # A reward must be scaled before the step's requests arrive; latencies may be older.
        max_age = DEMAND_POLL_SECONDS if model.spec.autoscaling else PROGRESS_POLL_SECONDS
        jobs: list[tuple[RLJob, ObservedState]] = []
        requests: list[Awaitable[DriverAnswer]] = []
        for key in self.cache.jobs_of(ObjectKey(REWARD_MODEL.kind, model.metadata.namespace, model.metadata.name)):
            manifest = self.cache.get(*key)
            if manifest is None:
                continue
            try:
                job = read_job(manifest)
            except (InvalidOwnerError, UnknownFieldsError):
                continue  # it has no Pods, or none that a newer operator did not make
            observed = self._observe_owned(key)
            jobs.append((job, observed))
            requests.append(self.driver.get_status(find_driver(job, observed), own_key, max_age))
        answers = zip(jobs, await asyncio.gather(*requests), strict=True)
        return tuple(
            demand
            for (job, observed), answer in answers
            for demand in read_demands(job, replace(observed, driver=answer.status), model.metadata.name)
        )

    async def apply(self, manifest: Manifest) -> None:
        resource, metadata = BY_KIND[manifest["kind"]], manifest["metadata"]
        where = (resource.kind, metadata["namespace"], metadata["name"])
        known = self.cache.get(*where)
        if known is None and where not in self._foreign and await self._create(resource, manifest):
            return
        known = known or await self._request("GET", resource, metadata["namespace"], metadata["name"])
        self._foreign.discard(where)
        name = _describe(resource, manifest)
        if not known:
            raise TransientError(f"{name} was deleted during its reconcile")
        if not _shares_owner(known, manifest):
            self._foreign.add(where)
            raise ForeignObjectError(f"{name} exists and does not belong to this object; delete or rename it")
        await self._update(resource, manifest, known)

    async def find_missing(self, workloads: Sequence[Manifest]) -> list[tuple[Reference, ...]]:
        return await self._preflight.find_missing(workloads)

    async def check(self, workload: Manifest) -> None:
        resource, metadata = BY_KIND[workload["kind"]], workload["metadata"]
        await self._preflight.check(workload, self.cache.get(resource.kind, metadata["namespace"], metadata["name"]))

    async def _create(self, resource: Resource, manifest: Manifest) -> bool:
        """Return False if an object of that name exists.

        An apply, although a POST costs the API server a tenth less: the fields of a POST are owned apart from those of
        later applies, so what these leave out would stay."""
        try:
            await self._apply(resource, manifest, CREATE_ONLY)
        except ApiError as error:
            if error.code == HTTPStatus.CONFLICT:
                return False
            raise _translate_refusal(error, resource, manifest) from error
        return True

    async def _update(self, resource: Resource, manifest: Manifest, known: Manifest) -> None:
        kept = _keep_token(known, manifest)
        try:
            # The uid makes it a conflict if another object has taken the name since.
            await self._apply(resource, kept, {"uid": known["metadata"]["uid"]})
        except ApiError as error:
            if is_conflict(error):
                await self._refresh(resource, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
            raise _translate_refusal(error, resource, manifest) from error
        if kept is not manifest:
            raise TransientError(f"{_describe(resource, manifest)} had lost its labels and was found with its token")

    async def _apply(self, resource: Resource, manifest: Manifest, condition: Manifest) -> None:
        body = manifest | {"metadata": manifest["metadata"] | condition}
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        with self.cache.track_write(resource, namespace, name):
            answer = await self._call("PATCH", resource, namespace, name, query=_FORCED, body=body, content_type=SSA)
            self.cache.upsert_own(resource, answer)

    async def _refresh(self, resource: Resource, namespace: str, name: str) -> None:
        """Read an object whose cached version is outdated."""
        self.cache.forget(resource.kind, namespace, name)
        if current := await self._request("GET", resource, namespace, name):
            self.cache.upsert(resource.kind, current, is_listed=True)

    async def delete(self, namespace: str, child: ChildKey) -> None:
        await self._delete(BY_KIND[child.kind], namespace, child.name)

    async def delete_job(self, key: JobKey) -> None:
        await self._delete(RLJOB, key.namespace, key.name)

    async def _delete(self, resource: Resource, namespace: str, name: str) -> None:
        known = self.cache.get(resource.kind, namespace, name)
        if known is None:
            return
        policy = "Foreground" if resource.kind in _FOREGROUND_KINDS else "Background"
        body = {"propagationPolicy": policy, "preconditions": {"uid": known["metadata"]["uid"]}}
        try:
            answer = await self._request("DELETE", resource, namespace, name, body=body)
        except TransientError:
            await self._refresh(resource, namespace, name)  # 409: another object has the name by now
            raise
        if (answer.get("metadata") or {}).get("deletionTimestamp") and answer.get("kind") == resource.kind:
            self.cache.upsert_own(resource, answer)
        else:
            self.cache.forget(resource.kind, namespace, name)

    async def ungate(self, namespace: str, pod: str) -> None:
        known = self.cache.get(POD.kind, namespace, pod)
        if known is None:
            return
        gates = known["spec"].get("schedulingGates") or []
        kept = [gate for gate in gates if gate["name"] != SCHEDULING_GATE]
        if kept == gates:
            return
        # The uid makes it a conflict if another Pod has taken the name.
        body = {"metadata": {"uid": known["metadata"]["uid"]}, "spec": {"schedulingGates": kept or None}}
        if answer := await self._request("PATCH", POD, namespace, pod, body=body, content_type=MERGE_PATCH):
            self.cache.upsert_own(POD, answer)

    async def force_delete(self, namespace: str, pod: str) -> None:
        """As Kubernetes does for the Pods of a deleted node: report the Pod as failed, then delete it without a grace
        period. Otherwise the Job controller keeps its finalizer on a head that never ends."""
        known = self.cache.get(POD.kind, namespace, pod)
        if known is None or not known["metadata"].get("deletionTimestamp"):
            return
        if (known.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            body = {"metadata": {"uid": known["metadata"]["uid"]}, "status": _build_failed_status(known, self._now())}
            answer = await self._request(
                "PATCH", POD, namespace, pod, "status", body=body, content_type=STRATEGIC_MERGE_PATCH
            )
            if answer:
                self.cache.upsert_own(POD, answer)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": known["metadata"]["uid"]}}
        answer = await self._request("DELETE", POD, namespace, pod, body=options)
        if (answer.get("metadata") or {}).get("finalizers"):
            self.cache.upsert_own(POD, answer)
        else:
            self.cache.forget(POD.kind, namespace, pod)

    async def update_status(self, owner: Owner, status: OwnerStatus) -> None:
        """Raises TransientError if the object is no longer the version that was observed.

        A uid as precondition has no effect: of a status update's metadata the API server keeps only the
        resourceVersion, and another object may have the name by now.
        """
        resource = RLJOB if isinstance(owner, RLJob) else REWARD_MODEL
        namespace, name = owner.metadata.namespace, owner.metadata.name
        version = (owner.metadata.model_extra or {}).get("resourceVersion")
        body = {
            "apiVersion": API_VERSION,
            "kind": resource.kind,
            "metadata": {"name": name, "namespace": namespace} | ({"resourceVersion": version} if version else {}),
            "status": status.to_manifest(),
        }
        if answer := await self._request(
            "PATCH", resource, namespace, name, "status", query=_FORCED, body=body, content_type=SSA
        ):
            self.cache.upsert_own(resource, answer)
            key = (JobKey if isinstance(owner, RLJob) else RewardModelKey)(namespace, name)
            self._on_read(key, owner.model_copy(update={"status": status}))

    async def record_event(self, owner: Owner, event: Event) -> None:
        """Equal events are one Event object, named by their digest; a repetition increases its count."""
        meta, now = owner.metadata, self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        text = "\0".join((meta.uid, event.type, event.reason, event.message))
        name = f"{meta.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            await self._call("POST", EVENT, meta.namespace, body=_build_event(owner, event, name, now))
        except ApiError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise translate(error, "create", "events", f"Event {meta.namespace}/{name}") from error
            old = await self._request("GET", EVENT, meta.namespace, name)
            change = {"count": int(old.get("count") or 0) + 1, "lastTimestamp": now}
            await self._request("PATCH", EVENT, meta.namespace, name, body=change, content_type=MERGE_PATCH)

    async def _request(
        self, method: str, resource: Resource, namespace: str, name: str, *subresource: str, **request: Any
    ) -> Manifest:
        """Return the answer; empty if the object does not exist."""
        try:
            return await self._call(method, resource, namespace, name, *subresource, **request)
        except ApiError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return {}
            what = "/".join((resource.plural, *subresource))
            raise translate(error, method.lower(), what, f"{resource.kind} {namespace}/{name}") from error

    async def _call(self, method: str, resource: Resource, namespace: str, *path: str, **request: Any) -> Manifest:
        if method != "GET" and not self._may_write():
            raise TransientError("this replica is not the leader")
        return await self.api.request(method, resource.path(namespace, *path), **request)


def _build_failed_status(pod: Manifest, now: datetime) -> Manifest:
    """With the condition that makes podFailurePolicy ignore the failure, unless the Pod has it."""
    conditions = pod["status"].get("conditions") or []
    if any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in conditions):
        return {"phase": "Failed"}
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByRLJob",
        "message": "the node did not confirm the end of the Pod",
        "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return {"phase": "Failed", "conditions": [condition]}


def _build_event(owner: Owner, event: Event, name: str, now: str) -> Manifest:
    meta = owner.metadata
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": meta.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": owner.kind,
            "namespace": meta.namespace,
            "name": meta.name,
            "uid": meta.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "source": {"component": MANAGED_BY},
        "reportingComponent": MANAGED_BY,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _describe(resource: Resource, manifest: Manifest) -> str:
    return f"{resource.kind} {manifest['metadata']['namespace']}/{manifest['metadata']['name']}"


def _translate_refusal(error: ApiError, resource: Resource, manifest: Manifest) -> Exception:
    # A kind of Kubernetes itself has no remedy: there, what the object refers to was not found.
    if resource.remedy and error.code == HTTPStatus.NOT_FOUND and "namespaces" not in error.message:
        return UserError(resource.describe_missing_kind())
    return translate(error, "patch", resource.plural, _describe(resource, manifest))


def _keep_token(known: Manifest, wanted: Manifest) -> Manifest:
    """Return the wanted Secret with the token of the known one, which running Pods use. A Secret that lost its labels
    is planned as new, with a new token."""
    if wanted["kind"] != "Secret" or read_token(known) in (None, read_token(wanted)):
        return wanted
    return wanted | {"data": known["data"]}


def _shares_owner(known: Manifest, wanted: Manifest) -> bool:
    old, new = ({ref["uid"] for ref in m["metadata"].get("ownerReferences") or []} for m in (known, wanted))
    return bool(old & new)
