"""Dry runs of workloads and of their Pods: what the API server would refuse, before anything exists that holds a node.

Leaves it to `loop` which workloads to check, and to `refusals` what an answer means. The Pod of a workload is checked
with it, because PodSecurity, LimitRanges, most policies, service accounts and priority classes are admitted by Pod
only. A used-up quota is left out: it frees up while the job waits. A Secret or ConfigMap that is missing would be found
by the kubelet, when the Pods have their nodes, and a claim by the scheduler, when other Pods have theirs; so their
metadata is read before the dry runs.

The API server writes a LimitRange's defaults into the Pod before it validates requests against limits, so that a
request above a default limit is an invalid field that is not in the job. One above a limit of the job is refused with
the workload.

Left out of the Secrets and ConfigMaps that are read: optional references; pull Secrets, without which the kubelet tries
to pull; by their names, what the operator itself creates for the owner and for RewardModels; and all Secrets of a Pod
with a CSI volume of its own. The Secrets Store CSI driver creates a Secret (secretObjects) when the first Pod mounts
its volume, and never without that Pod.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from rljob_api import foreign_texts
from rljob_api.errors import UserError
from rljob_api.wire.contract import MANAGED_BY
from rljob_core.backend import (
    FieldProblem,
    ForbiddenError,
    Manifest,
    PodRejectedError,
    Reference,
    RefusedError,
)
from rljob_core.children import reward_refs
from rljob_core.children.common import digest
from rljob_core.kube.client import METADATA_ONLY, SSA, ApiError
from rljob_core.kube.resources import BY_KIND, CLAIM, POD, Resource
from rljob_operator.kube import refusals

_SECRET = "Secret"
_KINDS = (_SECRET, "ConfigMap", CLAIM.kind)


def find_references(workload: Manifest) -> list[Reference]:
    """Return what the Pods of a workload need and the operator does not create, each once."""
    (owner,) = workload["metadata"]["ownerReferences"]
    spec = workload["spec"]["template"].get("spec")
    left_out = {_SECRET} if any(volume.get("csi") for volume in _list(spec, "volumes")) else set[str]()
    found = [each for each in dict.fromkeys(_list_references(spec)) if each.name and each.kind not in left_out]
    own = re.compile(f"{re.escape(owner['name'])}-|.*{reward_refs.child_name('')}$")  # what the operator itself creates
    return [each for each in found if each.kind == CLAIM.kind or not own.match(each.name)]


def _list_references(spec: Any) -> Iterator[Reference]:
    for container in (*_list(spec, "initContainers"), *_list(spec, "containers")):
        for variable in _list(container, "env"):
            yield from _read(variable.get("valueFrom"), "secretKeyRef", "configMapKeyRef")
        for source in _list(container, "envFrom"):
            yield from _read(source, "secretRef", "configMapRef")
    for volume in _list(spec, "volumes"):
        yield from _read(volume, "secret", "configMap", "persistentVolumeClaim")
        for source in _list(volume.get("projected"), "sources"):
            yield from _read(source, "secret", "configMap")


def _list(holder: Any, field: str) -> list[Manifest]:
    """Return the mappings of a list. What has another type is the API server's to refuse."""
    entries = holder.get(field) if isinstance(holder, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _read(holder: Any, *fields: str) -> Iterator[Reference]:
    """`fields`: with a Secret, a ConfigMap and a claim; fewer leave out the last."""
    for kind, field in zip(_KINDS, fields, strict=False):
        source = holder.get(field) if isinstance(holder, dict) else None
        if isinstance(source, dict) and not source.get("optional"):
            name = source.get("secretName") or source.get("claimName") or source.get("name")
            yield Reference(kind, name if isinstance(name, str) else "")


Call = Callable[..., Awaitable[Manifest]]
"""KubernetesBackend._call: method, resource, namespace, path."""

VERDICT_SECONDS = 30.0
"""How long a verdict counts. A job with a refused template is reconciled more often, and a sweep submits many jobs that
differ only in their names."""
CREATE_ONLY = {"resourceVersion": "1"}
"""Metadata of an apply that must create: no object has this version, so an existing one answers with 409."""
_DRY_RUN = {"dryRun": "All"}
_FORCED_DRY_RUN = _DRY_RUN | {"fieldManager": MANAGED_BY, "force": "true"}
_OWN_ANNOTATIONS = "rljob.dev/"
_NUM_DIGITS = 8
_MAX_NAME_LENGTH = 52 - _NUM_DIGITS
"""Limit of the beginning of another name: with more, the names of a StatefulSet's Pods may be too long."""


class _Place(NamedTuple):
    """Where a Secret, a ConfigMap or a claim should be."""

    namespace: str
    reference: Reference


class Preflight:
    """Checks workloads, and remembers the verdicts for a while."""

    def __init__(self, call: Call, clock: Callable[[], float] = time.monotonic) -> None:
        self._call, self._clock = call, clock
        self._verdicts: dict[str, tuple[float, Exception | None]] = {}
        """Time and error by digest, oldest first."""

    async def find_missing(self, workloads: Sequence[Manifest]) -> list[tuple[Reference, ...]]:
        """Return what the Pods of each workload need and does not exist. Without the right to read it, or with a
        verdict, nothing is missing. Raises TransientError."""
        self._forget(self._clock() - VERDICT_SECONDS)
        needed = [self._list_unread(workload) for workload in workloads]
        wanted = dict.fromkeys(each for references in needed for each in references)  # roles share Secrets
        exist = dict(zip(wanted, await asyncio.gather(*(self._may_exist(*each) for each in wanted)), strict=True))
        return [tuple(each.reference for each in references if not exist[each]) for references in needed]

    def _list_unread(self, workload: Manifest) -> list[_Place]:
        references = find_references(workload)
        if not references or any(key in self._verdicts for key in _identify(workload, references)):
            return []
        return [_Place(workload["metadata"]["namespace"], each) for each in references]

    async def check(self, workload: Manifest, known: Manifest | None) -> None:
        """Raises UserError, ForbiddenError, PodRejectedError or TransientError. `known` is the existing workload."""
        now = self._clock()
        self._forget(now - VERDICT_SECONDS)
        exact, alike = _identify(workload, find_references(workload))
        for key in (exact, alike):
            if verdict := self._verdicts.get(key):
                if verdict[1] is not None:
                    raise verdict[1].with_traceback(None)
                return
        try:
            await self._apply(workload, known)
            await self._create_pod(workload)
        except UserError as error:  # others may be granted at any time, and the work queue retries them ever later
            self._verdicts[exact] = (now, error)
            raise
        self._verdicts[alike] = (now, None)

    def _forget(self, before: float) -> None:
        while self._verdicts and self._verdicts[first := next(iter(self._verdicts))][0] <= before:
            del self._verdicts[first]

    async def _may_exist(self, namespace: str, reference: Reference) -> bool:
        try:
            await self._call("GET", BY_KIND.get(reference.kind, CLAIM), namespace, reference.name, accept=METADATA_ONLY)
        except ApiError as error:
            return error.code != HTTPStatus.NOT_FOUND
        return True

    async def _apply(self, workload: Manifest, known: Manifest | None) -> None:
        """As a new object, under another name if there is one: a Job's template is immutable, and a new Job replaces
        the old one."""
        resource, metadata = BY_KIND[workload["kind"]], workload["metadata"]
        name = metadata["name"]
        if known is not None:
            name = f"{name[:_MAX_NAME_LENGTH]}-{digest(workload)[:_NUM_DIGITS]}"
        body = workload | {"metadata": metadata | {"name": name} | CREATE_ONLY}
        namespace = metadata["namespace"]
        try:
            await self._call("PATCH", resource, namespace, name, query=_FORCED_DRY_RUN, body=body, content_type=SSA)
        except ApiError as error:
            if refusals.is_dry_run_unsupported(error) or refusals.is_conflict(error):
                return  # only the apply can find out
            raise refusals.translate(error, "patch", resource.plural, _describe(resource, workload)) from error

    async def _create_pod(self, workload: Manifest) -> None:
        """As the workload's controller does."""
        template, metadata = workload["spec"]["template"], workload["metadata"]
        owned = {"generateName": f"{metadata['name']}-", "ownerReferences": metadata["ownerReferences"]}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": template.get("metadata", {}) | owned}
        body["spec"] = template["spec"]
        try:
            await self._call("POST", POD, metadata["namespace"], query=_DRY_RUN, body=body)
        except ApiError as error:
            if refusals.is_quota_exceeded(error) and not refusals.is_quota_for_good(error):
                return
            if refusals.is_missing_right(error) or refusals.is_dry_run_unsupported(error):
                return
            if foreign_texts.LIMIT_RANGE.search(error.message):
                raise PodRejectedError(error.message, "LimitRange") from error
            raise _translate_pod_refusal(error, workload) from error


def _translate_pod_refusal(error: ApiError, workload: Manifest) -> Exception:
    translated = refusals.translate(error, "create", POD.plural, f"a Pod of {workload['metadata']['name']}")
    if isinstance(translated, ForbiddenError):
        return PodRejectedError(error.message)
    if isinstance(translated, RefusedError):
        fields = (FieldProblem(f"spec.template.{path.lstrip('.')}", text) for path, text in translated.fields)
        return RefusedError(str(translated), tuple(fields))
    return translated


def _identify(workload: Manifest, references: list[Reference]) -> tuple[str, str]:
    """Return keys of verdicts: of a refusal, and of an admission. A refusal has names in its message, so it is that of
    one workload only. An admission is that of all workloads of the namespace that differ in their owner's name and uid
    and in our annotations only; what they refer to may have the owner's name in its own."""
    (owner,) = workload["metadata"]["ownerReferences"]
    text = json.dumps(_without_own_annotations(workload), sort_keys=True)
    without_names = digest(text.replace(owner["uid"], "\0uid").replace(owner["name"], "\0name"))
    return digest(workload), digest([without_names, references])


def _without_own_annotations(value: Any, name: str = "") -> Any:
    if not isinstance(value, dict):
        return value
    is_kept = (lambda key: not str(key).startswith(_OWN_ANNOTATIONS)) if name == "annotations" else lambda key: True
    return {key: _without_own_annotations(inner, str(key)) for key, inner in value.items() if is_kept(key)}


def _describe(resource: Resource, manifest: Manifest) -> str:
    return f"{resource.kind} {manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
