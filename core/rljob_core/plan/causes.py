"""Why a job or a RewardModel waits: one cause per reason, each with a message that names the field to change.

Reads Pods, conditions of workloads and Warning events; decides nothing. Invariant: the message of a cause is the same
in every reconcile. It has no counts, times or generated Pod names, so its event is emitted once.

Of a Pod that the API server does not admit, it repeats the message, of a dry run or of an Event: that names who rejects
it, or what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from rljob_api import foreign_texts
from rljob_api.manifest.services.reward import RewardBase, RewardModel
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.text import clean_line, clean_text
from rljob_core.backend import ChildKey, Manifest, ObservedState
from rljob_core.children import reward_refs
from rljob_core.children.common import child_name
from rljob_core.children.gang import GATE_KUEUE, LABEL_KUEUE_QUEUE
from rljob_core.children.pods import avoided_by
from rljob_core.plan import conditions, observed_job
from rljob_core.plan.observed_job import ObservedJob, RoleView, exceeded_own_limit, find_disruption

_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_MAX_DETAIL_LENGTH = 1200
"""A condition has room for a cause and its remedy."""
_MAX_WORDS = 300
"""Characters of another program's text in a cause."""
_MAX_REJECTION_LENGTH = 4000
"""Limit of the API server's message: an admission webhook may answer anything."""
REJECTED = "FailedCreate"
"""The cause of Pods that the API server does not admit, for another reason than a quota or a LimitRange."""
_STARTING_REASONS = ("", "WaitingForPods", "WaitingForDeletion")
"""Reasons for which a RewardModel is not ready and needs no help yet. "" is a ready or a new one."""
REMEDIES = {
    "OOMKilled": "raise {path}.resources.limits.memory",
    "DiskLimitExceeded": "raise {path}.resources.limits.ephemeral-storage, or write less to files",
    "Evicted": "no action needed: the Pod is replaced, and backoffLimit is not charged",
    "ImagePull": "correct {path}.image, or name a Secret in spec.imagePullSecrets",
    "CreateContainerConfigError": "create the ConfigMap or Secret that the message names, or correct {path}.template",
    "Unschedulable": "compare {path}.nodePool (nodeSelector, tolerations) and {path}.resources with the nodes",
    "VolumeUnbound": "create the PersistentVolumeClaim that {claims} name, or see why it is not bound",
    "VolumeHeld": "let other Pods with the claim end, run these on the volume's node, or use a ReadWriteMany claim",
    "QuotaUnspecified": "set them in {path}.resources: the quota requires every Pod to specify them",
    "QuotaExceeded": "raise the namespace's ResourceQuota, or lower {path}.replicas or {path}.resources",
    "FailedCreate": "create what is missing, or change the policy that it names, or {path}.template",
    "LimitRange": "set requests and limits in {path}.resources, also those that RLJob sets by default, or "
    "change the namespace's LimitRange",
    "ReferenceMissing": "create it in the job's namespace, or correct the name; the Pods start then",
    "FailedMount": "create the ConfigMap, Secret or volume that the message names",
    "RewardModelMissing": "create it in the job's namespace, or correct {path}.rewardModelRef",
    "RewardModelNotReady": "see kubectl describe rewardmodel, or correct {path}.rewardModelRef",
    "SuspendedByKueue": "add RLJob.v1alpha1.rljob.dev to integrations.externalFrameworks of Kueue's configuration",
    "HeadSuspended": "kubectl {claims}; or, if Kueue did it, name RLJob in its integrations.externalFrameworks",
    "HeldByKueue": "set spec.scheduling.gang: kueue and queue, or let Kueue leave these Pods alone",
    "FunctionFailed": "fix {path} or the ConfigMap it references; the Pods retry automatically",
}
"""By cause. {path} is the path of the role in the manifest."""


class Cause(NamedTuple):
    """One reason for which a job waits."""

    reason: str
    message: str

    @classmethod
    def of(cls, cause: str, path: str, detail: str, claims: str = "") -> Cause:
        remedy = REMEDIES[cause].format(path=path, claims=clean_line(claims, _MAX_DETAIL_LENGTH))
        return cls(cause, f"{clean_text(detail, _MAX_DETAIL_LENGTH).removesuffix('.')}; {remedy}")


def find_causes(observed: ObservedJob) -> list[Cause]:
    """Every cause of a job, each once, in the order of the roles."""
    found: list[Cause] = []
    for role in observed.roles:
        name = child_name(observed.job, role.name)
        found += _causes_of_role(role, name, observed.children, observed.state.warnings)
    found += _held_by_others(observed)
    found += _unready_reward_models(observed)
    return list(dict.fromkeys(found))


def _held_by_others(observed: ObservedJob) -> Iterator[Cause]:
    """What Kueue, or someone else, keeps from starting. No event says so."""
    head = observed.head_job
    if head is not None and head["spec"].get("suspend") and not conditions.is_finished(observed.job.status):
        yield _suspended_head(head)
    if observed.job.spec.scheduling.gang == "kueue":
        return  # it waits as a gang
    for role in observed.roles:
        if held := [pod for pod in role.pods if observed_job.has_gate(pod, GATE_KUEUE)]:
            queue = observed_job.labels_of(held[0]).get(LABEL_KUEUE_QUEUE, "none")
            yield Cause.of("HeldByKueue", role.path, f"{role.name}: Kueue holds its Pods (queue: {queue})")


def _suspended_head(head: Manifest) -> Cause:
    metadata = head["metadata"]
    if queue := observed_job.labels_of(head).get(LABEL_KUEUE_QUEUE):
        detail = f"head: Kueue suspends its Job (queue: {queue}), which belongs to an RLJob"
        return Cause.of("SuspendedByKueue", "spec.head", detail)
    command = (
        f'patch job -n {metadata["namespace"]} {metadata["name"]} --type=merge -p \'{{"spec":{{"suspend":false}}}}\''
    )
    return Cause.of("HeadSuspended", "spec.head", "head: its Job is suspended by another than the operator", command)


def find_model_causes(
    model: RewardModel, role: RoleView, children: Mapping[ChildKey, Manifest], state: ObservedState
) -> list[Cause]:
    """Every cause of a RewardModel. A job fails when its own reward's function cannot start. A model has no end, and
    others may use it, so it reports the failure and its Pods retry."""
    name = reward_refs.child_name(model.metadata.name)
    failed = [_function_failure(role, pod) for pod in role.pods if not observed_job.is_ready(pod)]
    found = [*filter(None, failed), *_causes_of_role(role, name, children, state.warnings)]
    return list(dict.fromkeys(found))


def _causes_of_role(
    role: RoleView, workload: str, children: Mapping[ChildKey, Manifest], warnings: Iterable[Manifest]
) -> Iterator[Cause]:
    unready = [pod for pod in role.pods if not observed_job.is_ready(pod)]
    names = {observed_job.name_of(pod) for pod in unready}
    pull_secrets = _find_missing_pull_secrets(names, warnings)
    for pod in unready:
        if cause := _cause_of_pod(role, pod, pull_secrets):
            yield cause
    for event in warnings:
        reason, message = event.get("reason"), str(event.get("message", ""))
        if _involved_name(event) not in names:
            continue
        if reason == "FailedMount" and not foreign_texts.SLOW_KUBELET.search(message):
            yield Cause.of("FailedMount", role.path, f"{role.name}: {stable_message(message)}")
        # The message names generated volumes and Pods.
        if reason == "FailedAttachVolume" and foreign_texts.HELD_VOLUME.search(message):
            pod = next(pod for pod in unready if observed_job.name_of(pod) == _involved_name(event))
            detail = f"{role.name}: a volume is attached to another node{_describe_claims(pod)}"
            yield Cause.of("VolumeHeld", role.path, detail)
    if message := _creation_failure(workload, children, warnings if len(role.pods) < role.desired else ()):
        yield describe_rejection(role.name, role.path, message)


def _find_missing_pull_secrets(pods: Collection[str], warnings: Iterable[Manifest]) -> str:
    """The pull Secrets that the kubelet did not find; empty if it found all. The image may be public all the same."""
    for event in warnings:
        if event.get("reason") == "FailedToRetrieveImagePullSecret" and _involved_name(event) in pods:
            found = foreign_texts.PULL_SECRETS.search(str(event.get("message", "")))
            return found[1] if found else "that the Pod names"
    return ""


def _creation_failure(workload: str, children: Mapping[ChildKey, Manifest], warnings: Iterable[Manifest]) -> str:
    """Why the API server rejected a Pod of the workload last; empty if it did not. A condition is current, also about
    the first new Pod of an update. An Event may be old."""
    for key, child in children.items():
        if key.name == workload and observed_job.has_condition(child, "ReplicaFailure"):
            return str(observed_job.find_condition(child, "ReplicaFailure").get("message", ""))
    # The ReplicaSet of a Deployment has its name and a hash of at most ten letters or digits.
    involved = re.compile(re.escape(workload) + r"(-[a-z0-9]{1,10})?")
    for event in warnings:
        if event.get("reason") == "FailedCreate" and involved.fullmatch(_involved_name(event)):
            return str(event.get("message", ""))
    return ""


def describe_rejection(name: str, path: str, message: str, otherwise: str = REJECTED) -> Cause:
    """The cause of Pods that the API server rejects: a quota, or `otherwise`. `name` and `path` are the role's."""
    message = message[:_MAX_REJECTION_LENGTH]
    if exceeded := re.search(r"exceeded quota: ([^,]+), requested: (.*?), used:", message):
        return Cause.of("QuotaExceeded", path, f"{name}: exceeds quota {exceeded[1]} with {exceeded[2]}")
    if missing := re.search(r"failed quota: ([^:]+): must specify (\S+)", message):
        resources = missing[2].replace(",", ", ")
        return Cause.of("QuotaUnspecified", path, f"{name}: quota {missing[1]} requires {resources}")
    reason = foreign_texts.REJECTED_POD.sub("", message, count=1).strip() or "it gives no reason"
    return Cause.of(otherwise, path, f"{name}: the API server rejects its Pods: {reason[:_MAX_WORDS]}")


def _involved_name(event: Manifest) -> str:
    return str((event.get("involvedObject") or {}).get("name", ""))


def _function_failure(role: RoleView, pod: Manifest) -> Cause | None:
    end = observed_job.last_termination(pod)
    if end is None or end["exitCode"] != int(ExitCode.USER):
        return None
    error = observed_job.extract_error_message(end.get("message")) or "see its log"
    kind = role.spec.kind if isinstance(role.spec, RewardBase) else "function"
    return Cause.of("FunctionFailed", f"spec.{kind}", f"{role.name}: {error}")


def _cause_of_pod(role: RoleView, pod: Manifest, pull_secrets: str) -> Cause | None:
    if message := exceeded_own_limit(pod):
        return Cause.of("DiskLimitExceeded", role.path, f"{role.name}: {stable_message(message)}")
    if reason := find_disruption(pod):
        return Cause.of("Evicted", role.path, f"{role.name}: a Pod was evicted or lost its node ({reason})")
    for container in observed_job.container_statuses(pod):
        if cause := _cause_of_container(role, container, pull_secrets):
            return cause
    scheduled = observed_job.find_condition(pod, "PodScheduled")
    if scheduled.get("reason") == "Unschedulable":
        return _unschedulable(role, scheduled.get("message", ""), pod)
    return None


def _cause_of_container(role: RoleView, container: Manifest, pull_secrets: str) -> Cause | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in _IMAGE_REASONS:
        image = container.get("image") or role.spec.image or "of the role"
        missing = f", and the Secret {pull_secrets} of imagePullSecrets does not exist" if pull_secrets else ""
        return Cause.of("ImagePull", role.path, f"{role.name}: image {image} cannot be pulled{missing}")
    if waiting.get("reason") == "CreateContainerConfigError":
        message = stable_message(waiting.get("message", ""))
        return Cause.of("CreateContainerConfigError", role.path, f"{role.name}: {message}")
    ends = [(container.get(state) or {}).get("terminated") or {} for state in ("state", "lastState")]
    if any(end.get("reason") == "OOMKilled" for end in ends):
        return Cause.of("OOMKilled", role.path, f"{role.name} ran out of memory")
    return None


def _unschedulable(role: RoleView, message: str, pod: Manifest) -> Cause:
    message = message.partition(" preemption:")[0]  # repeats for each node that nothing can be evicted from it
    detail = f"{role.name}: {stable_message(message)}"
    if foreign_texts.HELD_VOLUME.search(message):
        return Cause.of("VolumeHeld", role.path, detail + _describe_claims(pod))
    if foreign_texts.UNBOUND_CLAIM.search(message):
        fields = "spec.checkpoint.persistentVolumeClaim.claimName and pvc:// sources (spec.model, spec.data)"
        return Cause.of("VolumeUnbound", role.path, detail + _describe_claims(pod), fields)
    selector = pod.get("spec", {}).get("nodeSelector") or {}
    if selector and foreign_texts.NODE_SELECTOR.search(message):
        labels = ", ".join(f"{key}={value}" for key, value in sorted(selector.items()))
        detail += f" (it requires nodes with {labels})"
    if avoided := avoided_by(pod.get("spec") or {}):
        detail += f" (it avoids the nodes {', '.join(avoided)})"
    return Cause.of("Unschedulable", role.path, detail)


def _describe_claims(pod: Manifest) -> str:
    volumes = pod.get("spec", {}).get("volumes") or []
    names = sorted({v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v})
    return f" (its claims: {', '.join(names)})" if names else ""


def _unready_reward_models(observed: ObservedJob) -> Iterator[Cause]:
    for index, reward in enumerate(observed.job.spec.rewards):
        if reward.reward_model_ref is None:
            continue
        name, path = reward.reward_model_ref.name, f"spec.rewards[{index}]"
        model = observed.state.reward_models.get(name)
        if model is None:
            detail = f"reward {reward.name}: RewardModel {name} does not exist"
            yield Cause.of("RewardModelMissing", path, detail)
        elif (reason := _unready_reason(model)) not in _STARTING_REASONS:
            # The model's own message has generated Pod names.
            detail = f"reward {reward.name}: RewardModel {name} is not ready ({reason})"
            yield Cause.of("RewardModelNotReady", path, detail)


def _unready_reason(model: RewardModel) -> str:
    return next((c.reason for c in model.status.conditions if (c.type, c.status) == ("Ready", "False")), "")


def stable_message(message: str) -> str:
    """The message without generated Pod names."""
    return re.sub(r'pods? "[^"]*" ', "", message, flags=re.IGNORECASE).removeprefix("Error creating: ")[:_MAX_WORDS]
