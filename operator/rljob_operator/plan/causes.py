"""Why a job or a RewardModel waits, told apart by cause, each with the words that name the field to change.

Reads Pods, workloads' conditions and Warning events; decides nothing. Invariant: the words of one cause stay the same
from look to look (no counts, times or names of Pods that come and go), so that they are written once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardBase, RewardModel
from rljob_api.wire.contract import ExitCode
from rljob_operator.backend import ChildKey, Manifest, Observed
from rljob_operator.children import reward_refs
from rljob_operator.children.common import TRAINER, child_name
from rljob_operator.plan.observed_job import (
    RoleView,
    World,
    container_statuses,
    is_ready,
    is_terminating,
    last_termination,
    name_of,
    what_it_said,
)

_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_LOST = ("Evicted", "NodeLost", "NodeShutdown", "Terminated")
_SLOW_KUBELET = re.compile(r"failed to sync \w+ cache: timed out")
"""Says that a busy kubelet has not read the object yet, and passes by itself; nothing is missing."""
_GOING = timedelta(seconds=60)
"""In which the garbage collector deletes the Pods of an earlier StatefulSet."""
_STARTS = ("", "WaitingForPods", "WaitingForNames")
"""Reasons of a RewardModel that is not ready and needs nobody's help yet; "" is ready, or not looked at."""
REMEDIES = {
    "OOMKilled": "raise {path}.resources.limits.memory",
    "Evicted": "the cluster's doing, not counted against backoffLimit; the Pod is replaced",
    "ImagePull": "correct {path}.image, or name a Secret in {path}.template.spec.imagePullSecrets",
    "CreateContainerConfigError": "create the ConfigMap or Secret that the message names, or correct {path}.template",
    "Unschedulable": "compare {path}.nodePool (nodeSelector, tolerations) and {path}.resources with the nodes",
    "VolumeUnbound": "create the PersistentVolumeClaim that {claims} name, or see why it is not bound",
    "QuotaUnspecified": "set those in {path}.resources: the quota counts them, so each Pod must name its own",
    "QuotaExceeded": "raise the namespace's ResourceQuota, or lower {path}.replicas or {path}.resources",
    "FailedCreate": "see {path}.template and the namespace's policies",
    "FailedMount": "create the ConfigMap, Secret or volume that the message names",
    "RewardModelMissing": "create it in the job's namespace, or correct {path}.rewardModelRef",
    "RewardModelNotReady": "see kubectl describe rewardmodel, or correct {path}.rewardModelRef",
    "PodNameTaken": "if nobody needs it: kubectl delete pod {claims}",
    "FunctionFailed": "mend {path}, or the ConfigMap that it names: its Pods try again by themselves",
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
    """Every cause of a job, each once, in the order of the roles."""
    found: list[Cause] = []
    for role in world.roles:
        path, name = role_path(job, role), child_name(job, role.name)
        found += _causes_of_role(role, path, name, world.children, observed.warnings)
    found += _unfit_reward_models(job, observed)
    return list(dict.fromkeys(found))


def find_blocking_pods(job: RLJob, world: World, observed: Observed) -> list[tuple[datetime, Cause]]:
    """Pods that have a trainer's name and are not of its StatefulSet, which says nothing and waits for the name for
    ever. With each the time from which it counts: what belonged to an earlier StatefulSet is about to go."""
    stateful_set = world.children.get(ChildKey("StatefulSet", child_name(job, TRAINER)))
    if stateful_set is None or is_terminating(stateful_set):
        return []
    metadata = stateful_set["metadata"]
    names = {f"{metadata['name']}-{index}" for index in range(job.spec.trainer.replicas)}
    taken = sorted(
        name_of(pod)
        for pod in observed.pods
        if name_of(pod) in names and not is_terminating(pod) and not _is_of(stateful_set, pod)
    )
    created = metadata.get("creationTimestamp")
    since = datetime.fromisoformat(created) + _GOING if created else datetime.min.replace(tzinfo=UTC)
    return [
        (
            since,
            Cause.of(
                "PodNameTaken",
                "",
                f"trainer: Pod {name} is not its StatefulSet's",
                f"-n {job.metadata.namespace} {name}",
            ),
        )
        for name in taken
    ]


def _is_of(workload: Manifest, pod: Manifest) -> bool:
    """Whether the workload has made the Pod, or will adopt it: one without a controller whose labels fit."""
    owners = pod["metadata"].get("ownerReferences") or []
    controller = next((owner.get("uid") for owner in owners if owner.get("controller")), None)
    if controller is not None:
        return bool(controller == workload["metadata"].get("uid"))
    wanted = (workload["spec"].get("selector") or {}).get("matchLabels") or {}
    return bool(wanted.items() <= (pod["metadata"].get("labels") or {}).items())


def find_model_causes(
    model: RewardModel, role: RoleView, children: Mapping[ChildKey, Manifest], observed: Observed
) -> list[Cause]:
    """Every cause of a RewardModel. A job ends when its own reward's function cannot start; a model, which others may
    use and which has no end, says so and goes on trying."""
    name = reward_refs.child_name(model.metadata.name)
    failed = [_function_failure(role, pod) for pod in role.pods if not is_ready(pod)]
    found = [*filter(None, failed), *_causes_of_role(role, "spec", name, children, observed.warnings)]
    return list(dict.fromkeys(found))


def role_path(job: RLJob, role: RoleView) -> str:
    if role.kind != "reward":
        return f"spec.{role.kind}"
    names = [f"reward-{reward.name}" for reward in job.spec.rewards]
    return f"spec.rewards[{names.index(role.name)}]"


def _causes_of_role(
    role: RoleView, path: str, workload: str, children: Mapping[ChildKey, Manifest], warnings: Iterable[Manifest]
) -> Iterator[Cause]:
    unready = [pod for pod in role.pods if not is_ready(pod)]
    for pod in unready:
        if cause := _cause_of_pod(role, pod, path):
            yield cause
    names = {name_of(pod) for pod in unready}
    for event in warnings:
        message = str(event.get("message", ""))
        if event.get("reason") == "FailedMount" and _about(event) in names and not _SLOW_KUBELET.search(message):
            yield Cause.of("FailedMount", path, f"{role.name}: {_stable(message)}")
    for message in _creation_failures(workload, children, warnings if len(role.pods) < role.desired else ()):
        yield _cause_of_refusal(role, path, message)


def _creation_failures(
    workload: str, children: Mapping[ChildKey, Manifest], warnings: Iterable[Manifest]
) -> Iterator[str]:
    """What the API server said last when the workload's controller asked for a Pod: a condition says that it is so
    now (an update's first new Pod among them, which comes on top), an Event that it was once."""
    for key, child in children.items():
        if key.name == workload:
            for condition in (child.get("status") or {}).get("conditions") or []:
                if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                    yield str(condition.get("message", ""))
                    return
    for event in warnings:
        # A Deployment's ReplicaSet is named after it, with a hash of ten letters or digits at most.
        ours = re.fullmatch(re.escape(workload) + r"(-[a-z0-9]{1,10})?", _about(event))
        if event.get("reason") == "FailedCreate" and ours:
            yield str(event.get("message", ""))
            return


def _cause_of_refusal(role: RoleView, path: str, message: str) -> Cause:
    if full := re.search(r"exceeded quota: ([^,]+), requested: (.*?), used:", message):
        return Cause.of("QuotaExceeded", path, f"{role.name}: quota {full[1]} has no room for {full[2]}")
    if unnamed := re.search(r"failed quota: ([^:]+): must specify (\S+)", message):
        words = unnamed[2].replace(",", ", ")
        return Cause.of("QuotaUnspecified", path, f"{role.name}: quota {unnamed[1]} asks for {words}")
    return Cause.of("FailedCreate", path, f"{role.name}: {_stable(message)}")


def _about(event: Manifest) -> str:
    return str((event.get("involvedObject") or {}).get("name", ""))


def _function_failure(role: RoleView, pod: Manifest) -> Cause | None:
    end = last_termination(pod)
    if end is None or end["exitCode"] != int(ExitCode.USER):
        return None
    said = what_it_said(end.get("message")) or "see its log"
    kind = role.spec.kind if isinstance(role.spec, RewardBase) else "function"
    return Cause.of("FunctionFailed", f"spec.{kind}", f"{role.name}: {said}")


def _cause_of_pod(role: RoleView, pod: Manifest, path: str) -> Cause | None:
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
    message = message.partition(" preemption:")[0]  # says once more of each node that nothing can be evicted there
    detail = f"{role.name}: {_stable(message)}"
    if "persistentvolumeclaim" in message.lower():
        volumes = pod.get("spec", {}).get("volumes") or []
        names = sorted({v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v})
        fields = "spec.checkpoint.persistentVolumeClaim.claimName and pvc:// sources (spec.model, spec.data)"
        return Cause.of("VolumeUnbound", path, detail + (f" (its claims: {', '.join(names)})" if names else ""), fields)
    selector = pod.get("spec", {}).get("nodeSelector") or {}
    if selector and "node affinity/selector" in message:
        labels = ", ".join(f"{key}={value}" for key, value in sorted(selector.items()))
        detail += f" (it asks for nodes with {labels})"
    return Cause.of("Unschedulable", path, detail)


def _unfit_reward_models(job: RLJob, observed: Observed) -> Iterator[Cause]:
    for index, reward in enumerate(job.spec.rewards):
        if reward.reward_model_ref is None:
            continue
        name, path = reward.reward_model_ref.name, f"spec.rewards[{index}]"
        model = observed.reward_models.get(name)
        if model is None:
            detail = f"reward {reward.name}: RewardModel {name} does not exist"
            yield Cause.of("RewardModelMissing", path, detail)
        elif (reason := _why_unready(model)) not in _STARTS:
            # Its own words name its Pods, which come and go.
            detail = f"reward {reward.name}: RewardModel {name} is not ready ({reason})"
            yield Cause.of("RewardModelNotReady", path, detail)


def _why_unready(model: RewardModel) -> str:
    return next((c.reason for c in model.status.conditions if (c.type, c.status) == ("Ready", "False")), "")


def _stable(message: str) -> str:
    """The message without the names of Pods, which come and go."""
    return re.sub(r'pods? "[^"]*" ', "", message, flags=re.IGNORECASE).removeprefix("Error creating: ")[:300]
