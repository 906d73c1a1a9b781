"""Backend on a real Kubernetes: reads come from the cache, writes are server-side applies of one field manager.

Leaves deciding to plan and the feeding of the cache to `watch`. Invariant: an object that is not this owner's is
never written, and nothing is deleted but the very object that was seen (uid precondition).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from http import HTTPStatus
from typing import Any

from rljob_api import API_VERSION
from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import MANAGED_BY, SCHEDULING_GATE
from rljob_api.wire.protocol import DriverStatus
from rljob_operator.backend import ChildKey, Event, ForeignObjectError, JobKey, Manifest, Observed, utc_now
from rljob_operator.children.common import child_name
from rljob_operator.children.config import read_token
from rljob_operator.kube.cache import Cache, OwnerKey, names_model, newest_warnings
from rljob_operator.kube.client import MERGE_PATCH, SSA, ApiError, KubeApi, translate
from rljob_operator.kube.driver import Driver, DriverClient, find_driver
from rljob_operator.kube.invalid import InvalidRewardModelError
from rljob_operator.kube.reader import Reader
from rljob_operator.kube.resources import (
    EVENT,
    POD,
    REWARD_MODEL,
    RLJOB,
    Resource,
    resource_of,
    resources_of_kind,
)
from rljob_operator.loop.reconcile import InvalidJobError
from rljob_operator.plan.apply_scaling import is_autoscaled, read_demands
from rljob_operator.plan.autoscale import POLL_SECONDS as SCALING_POLL_SECONDS
from rljob_operator.plan.autoscale import Demand
from rljob_operator.plan.job import POLL_SECONDS
from rljob_operator.plan.observed_job import find_pods

_FORCED = {"fieldManager": MANAGED_BY, "force": "true"}
_CREATE_ONLY_VERSION = "1"
"""As metadata.resourceVersion of an apply: made if it is not there, 409 if it is, as no object has this version."""
_DELETE_FIRST_PODS = ("Job", "StatefulSet", "Deployment")


class KubernetesBackend:
    """See above. `may_write` is asked before each write: only the leader's answer is yes."""

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        driver: DriverClient,
        *,
        keys: Callable[[], AsyncIterator[Any]],
        may_write: Callable[[], bool] = lambda: True,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.api, self.cache, self.driver = api, cache, driver
        self._keys, self._may_write, self._now = keys, may_write, now
        self._reader = Reader(api)
        self._foreign: set[tuple[str, str, str]] = set()
        self.on_read: Callable[[JobKey, str, RLJob | RewardModel | None], None] = lambda key, kind, owner: None
        """Told of each job and RewardModel that a look begins with; None: it is gone."""

    def watch(self) -> AsyncIterator[Any]:
        return self._keys()

    async def get_job(self, key: JobKey) -> RLJob | None:
        manifest = self.cache.get(RLJOB.kind, key.namespace, key.name)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            self.on_read(key, RLJOB.kind, None)
            return None
        job = await self._reader.read_job(manifest)
        self.on_read(key, RLJOB.kind, job)
        return job

    async def is_gone(self, resource: Resource, key: JobKey) -> bool:
        """Whether the API server knows a job or a RewardModel no more, whatever the cache holds."""
        await self._look_again(resource, key.namespace, key.name)
        return self.cache.get(resource.key, key.namespace, key.name) is None

    async def observe(self, job: RLJob) -> Observed:
        namespace = job.metadata.namespace
        children, pods, warnings = self._owned(OwnerKey(RLJOB.kind, namespace, job.metadata.name))
        models = {}
        for name in sorted({r.reward_model_ref.name for r in job.spec.rewards if r.reward_model_ref}):
            found = self.cache.get(REWARD_MODEL.kind, namespace, name)
            if found is not None:
                try:
                    models[name] = await self._reader.read_model(found)
                except InvalidRewardModelError:
                    continue  # its own status says what is wrong with it
        seen = Observed(children, pods, None, warnings, models)
        return replace(seen, driver=await self._ask(job, seen, is_scaled=is_autoscaled(job)))

    async def _ask(self, job: RLJob, seen: Observed, *, is_scaled: bool) -> DriverStatus | None:
        # Progress may be old; by demand a reward must be scaled before its burst comes.
        return await self.driver.ask(self.find_driver(job, seen), SCALING_POLL_SECONDS if is_scaled else POLL_SECONDS)

    @staticmethod
    def find_driver(job: RLJob, observed: Observed) -> Driver | None:
        """The driver that runs. An earlier job's head may still run; what it says is not about this one."""
        secret = observed.children.get(ChildKey("Secret", child_name(job, "token")))
        return find_driver(find_pods(job, observed), read_token(secret) if secret else None)

    async def get_reward_model(self, key: JobKey) -> RewardModel | None:
        manifest = self.cache.get(REWARD_MODEL.kind, key.namespace, key.name)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            self.on_read(key, REWARD_MODEL.kind, None)
            return None
        model = await self._reader.read_model(manifest)
        self.on_read(key, REWARD_MODEL.kind, model)
        return model

    async def observe_reward_model(self, model: RewardModel) -> Observed:
        children, pods, warnings = self._owned(
            OwnerKey(REWARD_MODEL.kind, model.metadata.namespace, model.metadata.name)
        )
        return Observed(children, pods, None, warnings, demands=await self._observe_demands(model))

    async def _observe_demands(self, model: RewardModel) -> tuple[Demand, ...]:
        """What each job of the namespace that refers to the model will ask of it."""
        demands: list[Demand] = []
        for key in self.cache.names(RLJOB):
            manifest = self.cache.get(*key) if key.namespace == model.metadata.namespace else None
            if manifest is None or not names_model(manifest, model.metadata.name):
                continue
            try:
                job = await self._reader.read_job(manifest)
            except InvalidJobError:
                continue  # it has no Pods that are ours
            children, pods, _ = self._owned(OwnerKey(*key))
            seen = Observed(children, pods)
            seen = replace(seen, driver=await self._ask(job, seen, is_scaled=model.spec.autoscaling is not None))
            demands += read_demands(job, seen, model.metadata.name)
        return tuple(demands)

    def _owned(self, owner: OwnerKey) -> tuple[dict[ChildKey, Manifest], tuple[Manifest, ...], tuple[Manifest, ...]]:
        objects = self.cache.owned(owner)
        children = {
            ChildKey(o["kind"], o["metadata"]["name"]): o for o in objects if o["kind"] not in (POD.kind, EVENT.kind)
        }
        pods = tuple(o for o in objects if o["kind"] == POD.kind)
        return children, pods, newest_warnings(o for o in objects if o["kind"] == EVENT.kind)

    async def apply(self, manifest: Manifest) -> None:
        resource, metadata = resource_of(manifest), manifest["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        known = self.cache.get(resource.key, namespace, name)
        if known is None and (resource.key, namespace, name) not in self._foreign:
            try:
                await self._apply(resource, manifest, {"resourceVersion": _CREATE_ONLY_VERSION})
                return
            except ApiError as error:
                if error.code != HTTPStatus.CONFLICT:
                    raise _refusal(error, resource, manifest) from error
        known = known or await self._get(resource, namespace, name)
        self._foreign.discard((resource.key, namespace, name))
        if known is None:
            raise TransientError(f"{resource.kind} {namespace}/{name} went while it was looked at")
        if not _shares_owner(known, manifest):
            self._foreign.add((resource.key, namespace, name))
            raise ForeignObjectError(
                f"{resource.kind} {namespace}/{name} exists and does not belong to this object; delete or rename it"
            )
        kept = _keep_token(known, manifest)
        try:
            # The uid makes it a conflict when another object has taken the name since.
            await self._apply(resource, kept, {"uid": known["metadata"]["uid"]})
        except ApiError as error:
            if error.code == HTTPStatus.CONFLICT:
                await self._look_again(resource, namespace, name)
            raise _refusal(error, resource, manifest) from error
        if kept is not manifest:
            raise TransientError(f"Secret {namespace}/{name} had lost its labels; it is found again, with its token")

    async def _apply(self, resource: Resource, manifest: Manifest, condition: Manifest) -> None:
        body = manifest | {"metadata": manifest["metadata"] | condition}
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        with self.cache.writing(resource, namespace, name):
            answer = await self._call("PATCH", resource, namespace, name, query=_FORCED, body=body, content_type=SSA)
            self.cache.upsert_own(resource, answer)

    async def _look_again(self, resource: Resource, namespace: str, name: str) -> None:
        """What the cache holds of this object is old."""
        self.cache.forget(resource.key, namespace, name)
        current = await self._get(resource, namespace, name)
        if current is not None:
            self.cache.upsert(resource.key, current, is_listed=True)

    async def delete(self, namespace: str, child: ChildKey) -> None:
        policy = "Foreground" if child.kind in _DELETE_FIRST_PODS else "Background"
        for resource in resources_of_kind(child.kind):
            known = self.cache.get(resource.key, namespace, child.name)
            await self._delete(resource, namespace, child.name, known, policy)

    async def delete_job(self, key: JobKey) -> None:
        known = self.cache.get(RLJOB.kind, key.namespace, key.name)
        await self._delete(RLJOB, key.namespace, key.name, known, "Background")

    async def _delete(self, resource: Resource, namespace: str, name: str, known: Manifest | None, policy: str) -> None:
        if known is None:
            return
        body = {"propagationPolicy": policy, "preconditions": {"uid": known["metadata"]["uid"]}}
        try:
            answer = await self._write("DELETE", resource, namespace, name, body=body, allow=(HTTPStatus.NOT_FOUND,))
        except TransientError:
            await self._look_again(resource, namespace, name)  # 409: another object has the name by now
            raise
        if (answer.get("metadata") or {}).get("deletionTimestamp") and answer.get("kind") == resource.kind:
            self.cache.upsert_own(resource, answer)
        else:
            self.cache.forget(resource.key, namespace, name)

    async def ungate(self, namespace: str, pod: str) -> None:
        known = self.cache.get(POD.kind, namespace, pod)
        if known is None:
            return
        gates = known["spec"].get("schedulingGates") or []
        kept = [gate for gate in gates if gate["name"] != SCHEDULING_GATE]
        if kept == gates:
            return
        # The uid makes it a conflict when a Pod of the same name has taken its place.
        body = {"metadata": {"uid": known["metadata"]["uid"]}, "spec": {"schedulingGates": kept or None}}
        answer = await self._write(
            "PATCH", POD, namespace, pod, body=body, content_type=MERGE_PATCH, allow=(HTTPStatus.NOT_FOUND,)
        )
        if answer:
            self.cache.upsert_own(POD, answer)

    async def update_status(self, job: RLJob, status: RLJobStatus) -> None:
        await self._put_status(RLJOB, job, status.to_manifest())

    async def update_reward_model_status(self, model: RewardModel, status: Any) -> None:
        await self._put_status(REWARD_MODEL, model, status.to_manifest())

    async def _put_status(self, resource: Resource, owner: RLJob | RewardModel, status: Manifest) -> None:
        """Refused, to be looked at again, when it is not any more the object that was looked at. A uid would not do:
        the API server drops all metadata of a status but the version, and another object may have the name by now."""
        namespace, name = owner.metadata.namespace, owner.metadata.name
        version = (owner.metadata.model_extra or {}).get("resourceVersion")
        body = {
            "apiVersion": API_VERSION,
            "kind": resource.kind,
            "metadata": {"name": name, "namespace": namespace} | ({"resourceVersion": version} if version else {}),
            "status": status,
        }
        answer = await self._write(
            "PATCH",
            resource,
            namespace,
            name,
            "status",
            query=_FORCED,
            body=body,
            content_type=SSA,
            allow=(HTTPStatus.NOT_FOUND,),
        )
        if answer:
            self.cache.upsert_own(resource, answer)

    async def record_event(self, job: RLJob | RewardModel, event: Event) -> None:
        """One Event object for equal events: its name is their digest, and a repeat raises its count."""
        meta = job.metadata
        text = "\0".join((meta.uid, event.type, event.reason, event.message))
        name = f"{meta.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        said = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        body: Manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": meta.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": job.kind,
                "namespace": meta.namespace,
                "name": meta.name,
                "uid": meta.uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:1024],
            "source": {"component": MANAGED_BY},
            "reportingComponent": MANAGED_BY,
            "firstTimestamp": said,
            "lastTimestamp": said,
            "count": 1,
        }
        try:
            await self._call("POST", EVENT, meta.namespace, None, body=body)
        except ApiError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise translate(error, "create", "events", f"Event {meta.namespace}/{name}") from error
            old = await self._get(EVENT, meta.namespace, name) or {}
            change = {"count": int(old.get("count") or 0) + 1, "lastTimestamp": said}
            await self._write("PATCH", EVENT, meta.namespace, name, body=change, content_type=MERGE_PATCH)

    async def _get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        try:
            return await self.api.request("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise translate(error, "get", resource.plural, f"{resource.kind} {namespace}/{name}") from error

    async def _write(
        self,
        method: str,
        resource: Resource,
        namespace: str,
        name: str,
        subresource: str | None = None,
        *,
        allow: tuple[int, ...] = (),
        **request: Any,
    ) -> Manifest:
        """The answer; empty for a code that is allowed."""
        try:
            return await self._call(method, resource, namespace, name, subresource, **request)
        except ApiError as error:
            if error.code in allow:
                return {}
            what = f"{resource.plural}/{subresource}" if subresource else resource.plural
            raise translate(error, method.lower(), what, f"{resource.kind} {namespace}/{name}") from error

    async def _call(
        self,
        method: str,
        resource: Resource,
        namespace: str,
        name: str | None,
        subresource: str | None = None,
        **request: Any,
    ) -> Manifest:
        if not self._may_write():
            raise TransientError("this replica does not lead")
        call: Awaitable[Manifest] = self.api.request(method, resource.path(namespace, name, subresource), **request)
        return await call


def _refusal(error: ApiError, resource: Resource, manifest: Manifest) -> Exception:
    where = f"{resource.kind} {manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
    if resource.is_optional and error.code == HTTPStatus.NOT_FOUND and "namespaces" not in error.message:
        return UserError(
            f"this cluster has no {resource.kind} of {resource.api_version}; install the scheduler that brings its "
            "CRD, or choose another spec.scheduling.gang"
        )
    return translate(error, "patch", resource.plural, where)


def _keep_token(known: Manifest, wanted: Manifest) -> Manifest:
    """Our Secret whose labels someone took is not found by them, and looked as if it had to be made: with a token that
    no running Pod knows."""
    if wanted["kind"] != "Secret" or read_token(known) in (None, read_token(wanted)):
        return wanted
    return wanted | {"data": known["data"]}


def _shares_owner(known: Manifest, wanted: Manifest) -> bool:
    def uids(manifest: Manifest) -> set[str]:
        return {ref["uid"] for ref in manifest["metadata"].get("ownerReferences") or []}

    return bool(uids(known) & uids(wanted))
