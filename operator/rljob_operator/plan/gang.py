"""Whether all Pods of a job exist and have nodes, and what follows when they do not in time. Pure.

Owns the states of a gang: held (some Pods are missing), released (all exist), whole (all have nodes), resting (it
gave its nodes back). Invariant: a job that has been whole and Running never goes back; its new Pods start at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import SCHEDULING_GATE
from rljob_operator.backend import Manifest
from rljob_operator.children.gang import GATE_KUEUE
from rljob_operator.plan.observed_job import World, name_of

TIMED_OUT = "TimedOut"
_MIN_REST_SECONDS = 30.0
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Gang:
    """What the gang asks of this look."""

    ungate: tuple[str, ...] = ()
    """Pods whose gate goes."""
    resting: bool = False
    """No workload may be there: the nodes were given back."""
    queued: tuple[str, str] | None = None
    """Reason and message of the condition Queued; None: it does not hold."""
    queued_since: datetime | None = None
    not_before: datetime | None = None

    def next_look(self, job: RLJob) -> datetime | None:
        """When the time alone changes something."""
        if self.not_before:
            return self.not_before
        timeout = timedelta(seconds=job.spec.scheduling.timeout_seconds)
        return self.queued_since + timeout if self.queued_since else None


def rest_seconds(job: RLJob) -> float:
    """How long a job that gave its nodes back leaves them to others: half its time-out, at least 30 s."""
    return max(_MIN_REST_SECONDS, job.spec.scheduling.timeout_seconds / 2)


def judge_gang(job: RLJob, world: World, was_up: bool, now: datetime) -> Gang:
    """The state of the gang now. `was_up`: the job has been Running since its workloads were made."""
    gated = tuple(sorted(name_of(pod) for role in world.roles for pod in role.pods if is_gated(pod)))
    scheduling, status = job.spec.scheduling, job.status
    if scheduling.gang == "none" or was_up:
        return Gang(ungate=gated)
    longest = now + timedelta(seconds=rest_seconds(job))  # what is later was said by a clock that was ahead
    if status.not_before and now < status.not_before <= longest:
        return _rest(job, status.not_before)
    wanted, exist, placed = count_pods(world)
    ungate = gated if scheduling.gang != "gates" or exist == wanted else ()
    if placed == wanted:
        return Gang(ungate=ungate)
    if exist == wanted and _waits_for_kueue(world):
        # Its place in the queue would be lost with the Pods, so this wait counts towards no time-out.
        message = f"queue {scheduling.queue} has not admitted the job; see its Kueue Workload {job.metadata.name}"
        return Gang(ungate, queued=("WaitingForQuota", message))
    since = min(status.queued_since or now, now)
    if now >= since + timedelta(seconds=scheduling.timeout_seconds):
        return _rest(job, longest)
    if exist < wanted:
        return Gang(ungate, queued=("WaitingForPods", f"{exist} of {wanted} Pods exist"), queued_since=since)
    return Gang(ungate, queued=("WaitingForNodes", f"{placed} of {wanted} Pods have a node"), queued_since=since)


def _rest(job: RLJob, until: datetime) -> Gang:
    seconds = job.spec.scheduling.timeout_seconds
    message = (
        f"not all Pods had a node within spec.scheduling.timeoutSeconds ({seconds} s); the nodes were given back, "
        f"next try at {until:%Y-%m-%dT%H:%M:%SZ}"
    )
    return Gang(resting=True, queued=(TIMED_OUT, message), not_before=until)


def count_pods(world: World) -> tuple[int, int, int]:
    """Pods wanted, that exist, and that have a node. Of each role no more than are wanted."""
    wanted = exist = placed = 0
    for role in world.roles:
        alive = [pod for pod in role.pods if pod.get("status", {}).get("phase") not in _ENDED]
        wanted += role.desired
        exist += min(role.desired, len(alive))
        placed += min(role.desired, sum(map(has_node, alive)))
    return wanted, exist, placed


def has_node(pod: Manifest) -> bool:
    """Whether a Pod has found its place; `rljob run` has processes, which run without any node."""
    return bool(pod.get("spec", {}).get("nodeName")) or pod.get("status", {}).get("phase") == "Running"


def is_gated(pod: Manifest, gate: str = SCHEDULING_GATE) -> bool:
    return any(found.get("name") == gate for found in pod.get("spec", {}).get("schedulingGates") or [])


def _waits_for_kueue(world: World) -> bool:
    return any(is_gated(pod, GATE_KUEUE) for role in world.roles for pod in role.pods)
