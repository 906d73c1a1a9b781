"""Deployment, StatefulSet and Job, as Kubernetes' own controllers treat them, as one pure function.

Takes the workloads and the Pods that exist, and says which Pods to create and delete and what each workload's status
is. Leaves starting and stopping processes to the kubelet. Invariant: applied to its own outcome it asks for nothing.
Differences from Kubernetes, all meant: names are ordinals and thus stable, and a failed Job backs off from 1 s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from rljob_cli.manifests import digest, is_ready, namespace_of, owner_of, parse_timestamp, phase_of, timestamp
from rljob_operator.backend import ChildKey, Manifest, key_of
from rljob_operator.plan.observed_job import is_terminating, name_of

LABEL_HASH = "pod-template-hash"
ANNOTATION_IDENTITY = "local.rljob.dev/identity"
"""Who the Pod is across its replacements: the same identity gets the same address."""
WORKLOADS = ("Deployment", "StatefulSet", "Job")
_JOB_BACKOFF_SECONDS = 1.0
_JOB_BACKOFF_MAX_SECONDS = 60.0


@dataclass
class PodPlan:
    """What to do. `wake_at`: when to look again though nothing changed."""

    create: list[Manifest] = field(default_factory=list)
    delete: list[str] = field(default_factory=list)
    statuses: dict[ChildKey, Manifest] = field(default_factory=dict)
    wake_at: datetime | None = None


def plan_pods(workloads: Iterable[Manifest], pods: Iterable[Manifest], now: datetime) -> PodPlan:
    """One round of all controllers, garbage collection included."""
    plan, pods = PodPlan(), list(pods)
    by_owner: dict[tuple[str, str], list[Manifest]] = {}
    for pod in pods:
        by_owner.setdefault(owner_of(pod) or ("", ""), []).append(pod)
    owners = set()
    for workload in workloads:
        kind = workload["kind"]
        owners.add((kind, name_of(workload)))
        own = by_owner.get((kind, name_of(workload)), [])
        controller = {"Deployment": _deployment, "StatefulSet": _stateful_set, "Job": _job}[kind]
        plan.statuses[key_of(workload)] = controller(workload, own, plan, now)
    for owner, orphans in by_owner.items():
        if owner not in owners:
            plan.delete += [name_of(pod) for pod in orphans if not is_terminating(pod)]
    return plan


def build_pod(workload: Manifest, name: str, identity: str, now: datetime) -> Manifest:
    """A Pod of the workload's template."""
    template = copy.deepcopy(workload["spec"]["template"])
    metadata = template.get("metadata") or {}
    metadata["name"], metadata["namespace"] = name, namespace_of(workload)
    metadata["labels"] = {**(metadata.get("labels") or {}), LABEL_HASH: template_hash(workload)}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ANNOTATION_IDENTITY: identity}
    metadata["creationTimestamp"] = timestamp(now)
    metadata["ownerReferences"] = [
        {
            "apiVersion": workload["apiVersion"],
            "kind": workload["kind"],
            "name": name_of(workload),
            "uid": workload["metadata"].get("uid", ""),
            "controller": True,
        }
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": template["spec"],
        "status": {"phase": "Pending"},
    }


def template_hash(workload: Manifest) -> str:
    return digest(workload["spec"]["template"])


def _is_current(pod: Manifest, workload: Manifest) -> bool:
    return pod["metadata"].get("labels", {}).get(LABEL_HASH) == template_hash(workload)


def _replicas(workload: Manifest) -> int:
    replicas = workload["spec"].get("replicas")
    return 1 if replicas is None else int(replicas)


def _share(value: Any, total: int, round_up: bool) -> int:
    """An IntOrString of a rolling update: a number of Pods, or per cent of them."""
    if isinstance(value, str) and value.endswith("%"):
        exact = int(value[:-1]) / 100 * total
        return math.ceil(exact) if round_up else math.floor(exact)
    return int(value)


def _deployment(workload: Manifest, pods: list[Manifest], plan: PodPlan, now: datetime) -> Manifest:
    spec, wanted = workload["spec"], _replicas(workload)
    alive = [pod for pod in pods if not is_terminating(pod)]
    current = [pod for pod in alive if _is_current(pod, workload) and phase_of(pod) not in ("Failed", "Succeeded")]
    old = [pod for pod in alive if pod not in current]
    strategy = spec.get("strategy") or {}
    rolling = strategy.get("rollingUpdate") or {}
    if strategy.get("type") == "Recreate":
        surge, unavailable = 0, wanted
    else:
        surge = _share(rolling.get("maxSurge", "25%"), wanted, round_up=True)
        unavailable = _share(rolling.get("maxUnavailable", "25%"), wanted, round_up=False)
    if not surge and not unavailable:
        unavailable = 1
    # Scale down what is too many: those that are not ready first, then the highest ordinals.
    excess = sorted(current, key=lambda pod: (is_ready(pod), -_ordinal(pod)))[: max(0, len(current) - wanted)]
    plan.delete += [name_of(pod) for pod in excess]
    kept = [pod for pod in current if pod not in excess]
    # Old Pods leave as far as enough others are ready; those that are not ready help nobody.
    num_ready = sum(is_ready(pod) for pod in kept + old)
    for pod in sorted(old, key=is_ready):
        if is_ready(pod):
            if num_ready - 1 < wanted - unavailable and wanted > 0:
                continue
            num_ready -= 1
        plan.delete.append(name_of(pod))
    occupied = len(kept) + sum(name_of(pod) not in plan.delete for pod in old)
    if strategy.get("type") == "Recreate" and old:
        occupied = wanted
    hash_ = template_hash(workload)
    taken = {name_of(pod) for pod in pods}
    for _ in range(max(0, min(wanted - len(kept), wanted + surge - occupied))):
        slot = next(i for i in range(len(taken) + 1) if f"{name_of(workload)}-{hash_[:5]}-{i}" not in taken)
        name = f"{name_of(workload)}-{hash_[:5]}-{slot}"
        taken.add(name)
        plan.create.append(build_pod(workload, name, name, now))
    return _deployment_status(workload, alive, kept, wanted, now)


def _deployment_status(
    workload: Manifest, alive: list[Manifest], current: list[Manifest], wanted: int, now: datetime
) -> Manifest:
    ready = sum(is_ready(pod) for pod in alive)
    done = ready >= wanted and len(alive) == len(current) == wanted
    return {
        "observedGeneration": workload["metadata"].get("generation", 1),
        "replicas": len(alive),
        "updatedReplicas": len(current),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "unavailableReplicas": max(0, wanted - ready),
        "conditions": [
            _condition(workload, "Available", ready >= wanted, "MinimumReplicasAvailable", now),
            _condition(workload, "Progressing", True, "NewReplicaSetAvailable" if done else "ReplicaSetUpdated", now),
        ],
    }


def _ordinal(pod: Manifest) -> int:
    tail = name_of(pod).rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1


def _stateful_set(workload: Manifest, pods: list[Manifest], plan: PodPlan, now: datetime) -> Manifest:
    spec, wanted, name = workload["spec"], _replicas(workload), name_of(workload)
    by_name = {name_of(pod): pod for pod in pods}
    names = [f"{name}-{ordinal}" for ordinal in range(wanted)]
    parallel = spec.get("podManagementPolicy") == "Parallel"
    for name_ in names:
        pod = by_name.get(name_)
        if pod is None:
            plan.create.append(build_pod(workload, name_, name_, now))
        elif phase_of(pod) in ("Failed", "Succeeded") and not is_terminating(pod):
            plan.delete.append(name_)
        if not parallel and (pod is None or not is_ready(pod)):
            break
    plan.delete += [n for n, pod in by_name.items() if n not in names and not is_terminating(pod)]
    if (spec.get("updateStrategy") or {}).get("type") != "OnDelete":
        plan.delete += _outdated_ordinal(workload, [by_name[n] for n in names if n in by_name], wanted)
    alive = [pod for pod in pods if not is_terminating(pod)]
    ready, hash_ = sum(is_ready(pod) for pod in alive), template_hash(workload)
    updated = sum(_is_current(pod, workload) for pod in alive)
    return {
        "observedGeneration": workload["metadata"].get("generation", 1),
        "replicas": len(alive),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "currentReplicas": updated,
        "updatedReplicas": updated,
        "updateRevision": f"{name}-{hash_}",
    }


def _outdated_ordinal(workload: Manifest, pods: list[Manifest], wanted: int) -> list[str]:
    """The next Pod of a rolling update: highest ordinal first, one at a time, broken ones at once."""
    outdated = [pod for pod in pods if not _is_current(pod, workload) and not is_terminating(pod)]
    broken = [pod for pod in outdated if not is_ready(pod)]
    if broken:
        return [name_of(pod) for pod in broken]
    if outdated and sum(is_ready(pod) for pod in pods) == wanted:
        return [name_of(outdated[-1])]
    return []


def _job(workload: Manifest, pods: list[Manifest], plan: PodPlan, now: datetime) -> Manifest:
    status: Manifest = copy.deepcopy(workload.get("status") or {})
    spec, name = workload["spec"], name_of(workload)
    if spec.get("completions", 1) != 1 or spec.get("parallelism", 1) != 1:
        raise NotImplementedError(f"Job {name}: only one completion at a time runs locally")
    active = [pod for pod in pods if phase_of(pod) in ("Pending", "Running") and not is_terminating(pod)]
    failed = [pod for pod in pods if phase_of(pod) == "Failed" and not is_terminating(pod)]
    done = _job_outcome(spec, pods, failed, now)
    finished = _true(status, "Complete") or _true(status, "Failed")
    if not finished and done:
        status.setdefault("conditions", []).append(done)
        if done["type"] == "Complete":
            status["completionTime"] = timestamp(now)
        finished = True
    if finished or spec.get("suspend"):
        plan.delete += [name_of(pod) for pod in active]
    elif not active and not any(is_terminating(pod) for pod in pods):
        due = _job_due(failed)
        if due and due > now:
            plan.wake_at = min(due, plan.wake_at) if plan.wake_at else due
        else:
            attempt = 1 + max((_ordinal(pod) for pod in pods), default=-1)
            plan.create.append(build_pod(workload, f"{name}-{attempt}", name, now))
    status.setdefault("startTime", timestamp(now))
    status["active"] = 0 if finished else len(active)
    status["ready"] = sum(is_ready(pod) for pod in active)
    status["failed"] = len(failed)
    status["succeeded"] = sum(phase_of(pod) == "Succeeded" for pod in pods)
    return status


def _job_outcome(spec: Manifest, pods: list[Manifest], failed: list[Manifest], now: datetime) -> Manifest | None:
    """The condition that ends the Job; None while it goes on."""
    if any(phase_of(pod) == "Succeeded" for pod in pods):
        return _job_condition("Complete", "CompletionsReached", "Reached expected number of succeeded pods", now)
    counted = 0
    for pod in failed:
        action, message = _failure_action(spec, pod)
        if action == "FailJob":
            return _job_condition("Failed", "PodFailurePolicy", message, now)
        counted += action != "Ignore"
    counted += sum(
        container.get("restartCount", 0)
        for pod in pods
        if pod["spec"].get("restartPolicy") == "OnFailure"
        for container in pod.get("status", {}).get("containerStatuses", [])
    )
    if counted > spec.get("backoffLimit", 6):
        return _job_condition("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit", now)
    return None


def _failure_action(spec: Manifest, pod: Manifest) -> tuple[str, str]:
    """What podFailurePolicy says of a failed Pod: FailJob, Ignore or Count, and why."""
    codes = {
        container["name"]: container.get("state", {}).get("terminated", {}).get("exitCode")
        for container in pod.get("status", {}).get("containerStatuses", [])
    }
    for index, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules", [])):
        wanted = rule.get("onExitCodes")
        if not wanted:
            continue
        for container, code in codes.items():
            if code in (None, 0) or wanted.get("containerName") not in (None, container):
                continue
            if (code in wanted["values"]) == (wanted["operator"] == "In"):
                reason = f"Container {container} for pod {name_of(pod)} failed with exit code {code}"
                return rule["action"], f"{reason} matching {rule['action']} rule at index {index}"
    return "Count", ""


def _job_due(failed: list[Manifest]) -> datetime | None:
    """When the next attempt may start: 1 s after the last failure, doubling."""
    ends = [
        parse_timestamp(terminated["finishedAt"])
        for pod in failed
        for container in pod["status"].get("containerStatuses", [])
        if (terminated := container.get("state", {}).get("terminated"))
    ]
    if not ends:
        return None
    delay = min(_JOB_BACKOFF_MAX_SECONDS, _JOB_BACKOFF_SECONDS * 2 ** (len(failed) - 1))
    return max(ends) + timedelta(seconds=delay)


def _true(status: Manifest, type_: str) -> bool:
    return any(c["type"] == type_ and c["status"] == "True" for c in status.get("conditions", []))


def _job_condition(type_: str, reason: str, message: str, now: datetime) -> Manifest:
    moment = timestamp(now)
    return {
        "type": type_,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastProbeTime": moment,
        "lastTransitionTime": moment,
    }


def _condition(workload: Manifest, type_: str, holds: bool, reason: str, now: datetime) -> Manifest:
    """A condition whose transition time is kept while its status stays."""
    status = "True" if holds else "False"
    for old in workload.get("status", {}).get("conditions", []):
        if old["type"] == type_ and old["status"] == status:
            return {**old, "reason": reason}
    return {"type": type_, "status": status, "reason": reason, "lastTransitionTime": timestamp(now)}
