"""Why a job waits, told apart by cause, each with the words that name the field to change.

Reads Pods, workloads' conditions and Warning events; decides nothing. Invariant: the words of one cause stay the same
from look to look (no counts, times or names of Pods that come and go), so that they are written once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rljob_api.job import RLJob
from rljob_operator.backend import Manifest, Observed
from rljob_operator.children.common import child_name
from rljob_operator.world import RoleView, World, container_statuses, is_ready, name_of

_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_LOST = ("Evicted", "NodeLost", "NodeShutdown", "Terminated")
REMEDIES = {
    "OOMKilled": "raise {path}.resources.limits.memory",
    "Evicted": "the cluster's doing, not counted against backoffLimit; the Pod is replaced",
    "ImagePull": "correct {path}.image, or name a Secret in {path}.template.spec.imagePullSecrets",
    "CreateContainerConfigError": "create the ConfigMap or Secret that the message names, or correct {path}.template",
    "Unschedulable": "compare {path}.nodePool (nodeSelector, tolerations) and {path}.resources with the nodes",
    "VolumeUnbound": "create the PersistentVolumeClaim that {claims} name, or see why it is not bound",
    "QuotaExceeded": "raise the namespace's ResourceQuota, or lower {path}.replicas or {path}.resources",
    "FailedCreate": "see {path}.template and the namespace's policies",
    "FailedMount": "create the ConfigMap, Secret or volume that the message names",
    "RewardModelMissing": "create it in the job's namespace, or correct {path}.rewardModelRef",
}
"""By cause. {path} is the role's place in the manifest."""


@dataclass(frozen=True)
class Cause:
    """One reason for which a job waits."""

    reason: str
    words: str

    @classmethod
    def of(cls, cause: str, path: str, detail: str, claims: str = "") -> Cause:
        return cls(cause, f"{detail}; {REMEDIES[cause].format(path=path, claims=claims)}")


def find_causes(job: RLJob, world: World, observed: Observed) -> list[Cause]:
    """Every cause, each once, in the order of the roles."""
    found = [cause for role in world.roles for cause in _causes_of_role(job, role, world, observed)]
    found += _missing_reward_models(job, observed)
    return list(dict.fromkeys(found))


def role_path(job: RLJob, role: RoleView) -> str:
    if role.kind != "reward":
        return f"spec.{role.kind}"
    names = [f"reward-{reward.name}" for reward in job.spec.rewards]
    return f"spec.rewards[{names.index(role.name)}]"


def _causes_of_role(job: RLJob, role: RoleView, world: World, observed: Observed) -> Iterator[Cause]:
    path = role_path(job, role)
    unready = [pod for pod in role.pods if not is_ready(pod)]
    for pod in unready:
        if cause := _cause_of_pod(job, role, pod, path):
            yield cause
    names = {name_of(pod) for pod in unready}
    for event in observed.warnings:
        about = (event.get("involvedObject") or {}).get("name", "")
        if event.get("reason") == "FailedMount" and about in names:
            yield Cause.of("FailedMount", path, f"{role.name}: {_stable(event.get('message', ''))}")
    if len(role.pods) < role.desired:
        for message in _creation_failures(job, role, world, observed):
            quota = re.search(r"exceeded quota: ([^,]+), requested: (.*?), used:", message)
            if quota:
                yield Cause.of("QuotaExceeded", path, f"{role.name}: quota {quota[1]} has no room for {quota[2]}")
            else:
                yield Cause.of("FailedCreate", path, f"{role.name}: {_stable(message)}")


def _creation_failures(job: RLJob, role: RoleView, world: World, observed: Observed) -> Iterator[str]:
    name = child_name(job, role.name)
    for key, child in world.children.items():
        if key.name == name:
            for condition in (child.get("status") or {}).get("conditions") or []:
                if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                    yield str(condition.get("message", ""))
                    return
    for event in observed.warnings:
        about = (event.get("involvedObject") or {}).get("name", "")
        # A Deployment's ReplicaSet is named after it, with a hash of ten letters or digits at most.
        if event.get("reason") == "FailedCreate" and re.fullmatch(re.escape(name) + r"(-[a-z0-9]{1,10})?", about):
            yield str(event.get("message", ""))
            return


def _cause_of_pod(job: RLJob, role: RoleView, pod: Manifest, path: str) -> Cause | None:
    status = pod.get("status") or {}
    disrupted = any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in status.get("conditions") or [])
    if disrupted or (status.get("phase") == "Failed" and status.get("reason") in _LOST):
        return Cause.of("Evicted", path, f"{role.name}: a Pod was evicted or lost its node")
    for container in container_statuses(pod):
        reason = ((container.get("state") or {}).get("waiting") or {}).get("reason")
        message = ((container.get("state") or {}).get("waiting") or {}).get("message", "")
        if reason in _IMAGE_REASONS:
            image = container.get("image") or role.spec.image or "of the role"
            return Cause.of("ImagePull", path, f"{role.name}: image {image} cannot be pulled")
        if reason == "CreateContainerConfigError":
            return Cause.of(reason, path, f"{role.name}: {_stable(message)}")
        ends = [(container.get(state) or {}).get("terminated") or {} for state in ("state", "lastState")]
        if any(end.get("reason") == "OOMKilled" for end in ends):
            return Cause.of("OOMKilled", path, f"{role.name} ran out of memory")
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return _unschedulable(role, condition.get("message", ""), path, pod)
    return None


def _unschedulable(role: RoleView, message: str, path: str, pod: Manifest) -> Cause:
    if "persistentvolumeclaim" in message.lower():
        volumes = pod.get("spec", {}).get("volumes") or []
        names = sorted({v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v})
        fields = "spec.checkpoint.persistentVolumeClaim.claimName and pvc:// sources (spec.model, spec.data)"
        detail = f"{role.name}: {_stable(message)}" + (f" (its claims: {', '.join(names)})" if names else "")
        return Cause.of("VolumeUnbound", path, detail, fields)
    return Cause.of("Unschedulable", path, f"{role.name}: {_stable(message)}")


def _missing_reward_models(job: RLJob, observed: Observed) -> Iterator[Cause]:
    for index, reward in enumerate(job.spec.rewards):
        reference = reward.reward_model_ref
        if reference and reference.name not in observed.reward_models:
            detail = f"reward {reward.name}: RewardModel {reference.name} does not exist"
            yield Cause.of("RewardModelMissing", f"spec.rewards[{index}]", detail)


def _stable(message: str) -> str:
    """The message without the names of Pods, which come and go."""
    return re.sub(r'pods? "[^"]*" ', "", message, flags=re.IGNORECASE).removeprefix("Error creating: ")[:300]
