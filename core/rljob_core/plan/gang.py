"""The gang of a job: whether all its Pods exist and have nodes, and what to do if not in time. Pure.

A gang is incomplete (Pods are missing), released (all exist), placed (all have nodes), or backing off (it released its
nodes). Invariant: a job that has been Running never returns to an earlier state; its replacement Pods start at once,
unless Kueue holds them.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import SCHEDULING_GATE
from rljob_core.backend import Manifest
from rljob_core.children.common import HEAD, TRAINER
from rljob_core.children.gang import GATE_KUEUE, is_outside_gang
from rljob_core.plan.conditions import Reason
from rljob_core.plan.observed_job import ObservedJob, RoleView, has_gate, name_of

TIMED_OUT = "TimedOut"
_MIN_BACKOFF_SECONDS = 30.0
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class GangState:
    """What the gang requires from this reconcile."""

    ungate: tuple[str, ...] = ()
    """Pods whose scheduling gate to remove."""
    is_backing_off: bool = False
    """The nodes were released: no workload may exist."""
    queued: Reason | None = None
    """Reason and message of the condition Queued; None: it is False."""
    queued_since: datetime | None = None
    not_before: datetime | None = None

    def next_deadline(self, job: RLJob) -> datetime | None:
        """When the passage of time alone changes the state."""
        if self.not_before:
            return self.not_before
        timeout = timedelta(seconds=job.spec.scheduling.timeout_seconds)
        return self.queued_since + timeout if self.queued_since else None


def evaluate_gang(observed: ObservedJob, has_been_running: bool, now: datetime) -> GangState:
    """The state now. `has_been_running`: the job has been Running since its workloads were created."""
    job = observed.job
    gated = tuple(sorted(name_of(pod) for role in observed.roles for pod in role.pods if is_gated(pod)))
    scheduling, status = job.spec.scheduling, job.status
    if has_been_running and _is_preempted(observed):
        return GangState(ungate=gated, queued=_wait_for_quota(job))
    if scheduling.gang == "none" or has_been_running:
        return GangState(ungate=gated)
    latest = now + timedelta(seconds=2 * _least_rest_seconds(job))
    if status.not_before and now < status.not_before <= latest:  # a later time was written by a clock that was ahead
        return _back_off(job, status.not_before)
    desired, exist, placed = count_pods(observed)
    ungate = gated if scheduling.gang != "gates" or exist == desired else ()
    if placed == desired:
        return GangState(ungate=ungate)
    if exist == desired and any(is_gated(pod, GATE_KUEUE) for role in find_members(observed) for pod in role.pods):
        # Without its Pods the job would lose its place in the queue, so this wait does not count towards the timeout.
        return GangState(ungate, queued=_wait_for_quota(job))
    since = min(status.queued_since or now, now)
    if now >= since + timedelta(seconds=scheduling.timeout_seconds):
        return _back_off(job, now + timedelta(seconds=choose_rest_seconds(job, now)))
    if exist < desired:
        return GangState(ungate, queued=("WaitingForPods", f"{exist} of {desired} Pods exist"), queued_since=since)
    return GangState(ungate, queued=("WaitingForNodes", f"{placed} of {desired} Pods have a node"), queued_since=since)


def _least_rest_seconds(job: RLJob) -> float:
    """A job leaves its released nodes to others for half its timeout."""
    return max(_MIN_BACKOFF_SECONDS, job.spec.scheduling.timeout_seconds / 2)


def choose_rest_seconds(job: RLJob, now: datetime) -> int:
    """Between that time and twice as much: jobs that each hold a part of the nodes must not wait in step. It depends on
    the job and on the time of the attempt alone."""
    identity = f"{job.metadata.uid or (job.metadata.namespace, job.metadata.name)} {now.timestamp():.0f}"
    jitter = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4]) / 2**32  # 0 to 1
    return round(_least_rest_seconds(job) * (1 + jitter))


def _is_preempted(observed: ObservedJob) -> bool:
    """Whether Kueue has withdrawn the quota of a running job: no Pod of the training group may start. The gate of a
    single replacement is opened at once."""
    group = [pod for role in observed.roles if role.kind in (HEAD, TRAINER) for pod in role.pods]
    return bool(group) and all(is_gated(pod, GATE_KUEUE) for pod in group)


def _wait_for_quota(job: RLJob) -> Reason:
    queue, name = job.spec.scheduling.queue, job.metadata.name
    return "WaitingForQuota", f"queue {queue} has not admitted the job; see its Kueue Workload {name}"


def _back_off(job: RLJob, until: datetime) -> GangState:
    seconds = job.spec.scheduling.timeout_seconds
    message = (
        f"not all Pods had a node within spec.scheduling.timeoutSeconds ({seconds} s); the nodes were released; "
        f"next attempt at {until:%Y-%m-%dT%H:%M:%SZ}"
    )
    return GangState(is_backing_off=True, queued=(TIMED_OUT, message), not_before=until)


def count_pods(observed: ObservedJob) -> tuple[int, int, int]:
    """Pods of the gang that are desired, that exist, and that have a node. No role counts more than it desires."""
    desired = exist = placed = 0
    for role in find_members(observed):
        alive = [pod for pod in role.pods if pod.get("status", {}).get("phase") not in _ENDED]
        desired += role.desired
        exist += min(role.desired, len(alive))
        placed += min(role.desired, sum(map(has_node, alive)))
    return desired, exist, placed


def find_members(observed: ObservedJob) -> list[RoleView]:
    """The roles whose Pods start together."""
    return [role for role in observed.roles if not is_outside_gang(observed.job, role.spec)]


def has_node(pod: Manifest) -> bool:
    """Whether a Pod is placed. The processes of `rljob run` are running without a node."""
    return bool(pod.get("spec", {}).get("nodeName")) or pod.get("status", {}).get("phase") == "Running"


def is_gated(pod: Manifest, gate: str = SCHEDULING_GATE) -> bool:
    return has_gate(pod, gate)
