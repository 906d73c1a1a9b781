"""Kubernetes' controllers of Deployment, StatefulSet and Job, as one pure function.

Differences from Kubernetes: Pods have stable names with ordinals, a failed Job backs off from 1 s, and a changed
template does not replace Pods. Invariant: applied to its own outcome it plans nothing.
"""

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from rljob_cli.manifests import digest, is_ready, namespace_of, owner_of, phase_of, timestamp
from rljob_core.backend import ChildKey, Manifest, key_of
from rljob_core.plan.observed_job import is_terminating, name_of

ANNOTATION_IDENTITY = "local.rljob.dev/identity"
"""The same for all Pods that replace each other: they get the same address."""
WORKLOADS = ("Deployment", "StatefulSet", "Job")
_ENDED = ("Failed", "Succeeded")
_JOB_BACKOFF_SECONDS = 1.0
_JOB_BACKOFF_MAX_SECONDS = 60.0


@dataclass
class PodPlan:
    """The actions of one round. `wake_at`: the time of the next round if nothing changes before."""

    create: list[Manifest] = field(default_factory=list)
    delete: list[str] = field(default_factory=list)
    statuses: dict[ChildKey, Manifest] = field(default_factory=dict)
    wake_at: datetime | None = None


def plan_pods(workloads: Iterable[Manifest], pods: Iterable[Manifest], now: datetime) -> PodPlan:
    """Plan one round of all controllers, including garbage collection."""
    plan = PodPlan()
    by_owner: dict[tuple[str, str], list[Manifest]] = {}
    for pod in pods:
        by_owner.setdefault(owner_of(pod) or ("", ""), []).append(pod)
    controllers = {"Deployment": _plan_deployment, "StatefulSet": _plan_stateful_set, "Job": _plan_job}
    for workload in workloads:
        own = by_owner.pop((workload["kind"], name_of(workload)), [])
        plan.statuses[key_of(workload)] = controllers[workload["kind"]](workload, own, plan, now)
    for orphans in by_owner.values():
        plan.delete += [name_of(pod) for pod in orphans if not is_terminating(pod)]
    return plan


def build_pod(workload: Manifest, name: str, identity: str, now: datetime) -> Manifest:
    template = copy.deepcopy(workload["spec"]["template"])
    metadata = template.get("metadata") or {}
    metadata["name"], metadata["namespace"] = name, namespace_of(workload)
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ANNOTATION_IDENTITY: identity}
    metadata["creationTimestamp"] = timestamp(now)
    owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": name_of(workload)}
    metadata["ownerReferences"] = [{**owner, "uid": workload["metadata"].get("uid", ""), "controller": True}]
    status = {"phase": "Pending"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": status}


def _ordinal(pod: Manifest) -> int:
    tail = name_of(pod).rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1


def _replica_status(pods: Iterable[Manifest]) -> Manifest:
    alive = [pod for pod in pods if not is_terminating(pod)]
    return {"replicas": len(alive), "readyReplicas": sum(map(is_ready, alive))}


def _plan_deployment(workload: Manifest, pods: list[Manifest], plan: PodPlan, now: datetime) -> Manifest:
    """Keep `replicas` Pods. To scale down, delete unready Pods first, then the highest ordinals."""
    wanted = workload["spec"]["replicas"]
    alive = [pod for pod in pods if not is_terminating(pod)]
    ended = [pod for pod in alive if phase_of(pod) in _ENDED]
    current = sorted((pod for pod in alive if pod not in ended), key=lambda pod: (is_ready(pod), -_ordinal(pod)))
    excess = current[: max(0, len(current) - wanted)]
    plan.delete += [name_of(pod) for pod in [*excess, *ended]]
    taken = {name_of(pod) for pod in pods}
    prefix = f"{name_of(workload)}-{digest(workload['spec']['template'])[:5]}"
    free = (name for ordinal in itertools.count() if (name := f"{prefix}-{ordinal}") not in taken)
    for name in itertools.islice(free, max(0, wanted - len(current))):
        plan.create.append(build_pod(workload, name, name, now))
    return _replica_status(pods)


def _plan_stateful_set(workload: Manifest, pods: list[Manifest], plan: PodPlan, now: datetime) -> Manifest:
    """Keep one Pod per ordinal. Ordinals start in parallel, as the operator's StatefulSets request."""
    by_name = {name_of(pod): pod for pod in pods}
    names = [f"{name_of(workload)}-{ordinal}" for ordinal in range(workload["spec"]["replicas"])]
    plan.create += [build_pod(workload, name, name, now) for name in names if name not in by_name]
    for name, pod in by_name.items():
        if not is_terminating(pod) and (name not in names or phase_of(pod) in _ENDED):
            plan.delete.append(name)
    return _replica_status(pods)


def _plan_job(workload: Manifest, pods: list[Manifest], plan: PodPlan, now: datetime) -> Manifest:
    """Run one Pod to completion; replace failed ones until a policy or the backoff limit fails the Job."""
    status: Manifest = copy.deepcopy(workload.get("status") or {})
    spec, name = workload["spec"], name_of(workload)
    active = [pod for pod in pods if phase_of(pod) in ("Pending", "Running") and not is_terminating(pod)]
    failed = [pod for pod in pods if phase_of(pod) == "Failed" and not is_terminating(pod)]
    is_finished = bool(status.get("conditions"))
    if not is_finished and (outcome := _job_outcome(spec, pods, failed, now)):
        status["conditions"] = [outcome]
        if outcome["type"] == "Complete":
            status["completionTime"] = timestamp(now)
        is_finished = True
    if is_finished or spec.get("suspend"):
        plan.delete += [name_of(pod) for pod in active]
    elif not active and not any(is_terminating(pod) for pod in pods):
        due = _job_due(failed)
        if due and due > now:
            plan.wake_at = min(due, plan.wake_at) if plan.wake_at else due
        else:
            attempt = 1 + max((_ordinal(pod) for pod in pods), default=-1)
            plan.create.append(build_pod(workload, f"{name}-{attempt}", name, now))
    status.setdefault("startTime", timestamp(now))
    status["active"] = 0 if is_finished else len(active)
    status["ready"] = sum(is_ready(pod) for pod in active)
    status["failed"] = len(failed)
    status["succeeded"] = sum(phase_of(pod) == "Succeeded" for pod in pods)
    return status


def _job_outcome(spec: Manifest, pods: list[Manifest], failed: list[Manifest], now: datetime) -> Manifest | None:
    if any(phase_of(pod) == "Succeeded" for pod in pods):
        return _job_condition("Complete", "CompletionsReached", "Reached expected number of succeeded pods", now)
    num_failures = 0
    for pod in failed:
        action, message = _failure_action(spec, pod)
        if action == "FailJob":
            return _job_condition("Failed", "PodFailurePolicy", message, now)
        num_failures += action != "Ignore"
    if num_failures > spec.get("backoffLimit", 6):
        return _job_condition("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit", now)
    return None


def _failure_action(spec: Manifest, pod: Manifest) -> tuple[str, str]:
    """Return podFailurePolicy's action for a failed Pod (FailJob, Ignore or Count), and the reason."""
    codes = {
        container["name"]: container.get("state", {}).get("terminated", {}).get("exitCode")
        for container in pod.get("status", {}).get("containerStatuses", [])
    }
    for index, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules", [])):
        wanted = rule.get("onExitCodes", {})
        container = wanted.get("containerName")
        if (code := codes.get(container)) in wanted.get("values", []):
            reason = f"Container {container} for pod {name_of(pod)} failed with exit code {code}"
            return rule["action"], f"{reason} matching {rule['action']} rule at index {index}"
    return "Count", ""


def _job_due(failed: list[Manifest]) -> datetime | None:
    """Return when the next attempt may start: 1 s after the last failure, doubling."""
    ends = [
        datetime.fromisoformat(terminated["finishedAt"])
        for pod in failed
        for container in pod["status"].get("containerStatuses", [])
        if (terminated := container.get("state", {}).get("terminated"))
    ]
    if not ends:
        return None
    delay = min(_JOB_BACKOFF_MAX_SECONDS, _JOB_BACKOFF_SECONDS * 2 ** (len(failed) - 1))
    return max(ends) + timedelta(seconds=delay)


def _job_condition(type_: str, reason: str, message: str, now: datetime) -> Manifest:
    times = dict.fromkeys(("lastProbeTime", "lastTransitionTime"), timestamp(now))
    return {"type": type_, "status": "True", "reason": reason, "message": message, **times}
