"""Where a job stands in its life: one verdict from its spec, its status and the observed world.

Decides, and builds nothing; is asked only about jobs whose end is not stored yet. The checks are in the order of
their weight: an end that happened counts before any wish of the spec, and a mistake of the user's before any retry.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardBase
from rljob_api.wire.contract import ANNOTATION_RETRY, MANAGED_BY, ExitCode
from rljob_operator.backend import Manifest, Observed
from rljob_operator.children.common import REWARD
from rljob_operator.plan import conditions
from rljob_operator.plan.causes import role_path
from rljob_operator.plan.observed_job import RoleView, World, find_user_error, last_termination, name_of, what_it_said

State = Literal["suspended", "succeeded", "failed", "active"]
MANAGED_BY_US = f"rljob.dev/{MANAGED_BY}"
"""spec.managedBy of our own jobs; the same as leaving it out."""
USER_ERROR = "UserError"
"""Reason of a failure that the user alone can mend."""


@dataclass(frozen=True)
class Verdict:
    """The state, and for an end its reason and message."""

    state: State
    reason: str = ""
    message: str = ""


def is_ours_to_manage(job: RLJob) -> bool:
    """Whether this operator acts on the job at all. One under deletion is left to the garbage collector."""
    deleted = (job.metadata.model_extra or {}).get("deletionTimestamp")
    return job.spec.managed_by in (None, MANAGED_BY_US) and not deleted


def asked_retry(job: RLJob) -> str:
    """The value of the annotation that asks for a retry; the one that was acted on last where there is none."""
    return job.metadata.annotations.get(ANNOTATION_RETRY) or job.status.retried


def wants_retry(job: RLJob) -> bool:
    """Whether the job has failed for good and is to begin anew: its annotation asks, with a value that is new, or its
    spec, whose mistake it was, has been changed since."""
    failed = conditions.find(job.status, conditions.FAILED)
    if failed is None or failed.status != "True" or not conditions.is_finished(job.status):
        return False
    is_changed = failed.reason == USER_ERROR and failed.observed_generation < job.metadata.generation
    return is_changed or asked_retry(job) != job.status.retried


def judge(job: RLJob, world: World, restarts: dict[str, int], now: datetime) -> Verdict:
    """The verdict. `restarts` by role name are the counts that this look will report."""
    if _has_condition(world.head_job, "Complete"):
        return Verdict("succeeded", "JobSucceeded", "the driver has finished all steps")
    failure = _user_error(job, world) or _head_failure(world) or _exhausted(world, restarts)
    if failure:
        return failure
    if job.spec.suspend:
        return Verdict("suspended")
    deadline = deadline_of(job)
    if deadline and now >= deadline:
        seconds = job.spec.active_deadline_seconds
        return Verdict("failed", "DeadlineExceeded", f"ran longer than spec.activeDeadlineSeconds ({seconds} s)")
    return Verdict("active")


def deadline_of(job: RLJob) -> datetime | None:
    """When activeDeadlineSeconds is over. Suspending stops the clock: it starts anew, as a Job's does."""
    seconds, start = job.spec.active_deadline_seconds, job.status.start_time
    return start + timedelta(seconds=seconds) if seconds and start else None


def expiry_of(job: RLJob) -> datetime | None:
    """When ttlSecondsAfterFinished is over."""
    seconds, end = job.spec.ttl_seconds_after_finished, job.status.completion_time
    return end + timedelta(seconds=seconds) if seconds is not None and end else None


def count_restarts(job: RLJob, world: World, observed: Observed) -> dict[str, int]:
    """Restarts by role. Never fewer than were reported: a replaced Pod begins to count from zero. Resuming a
    suspended job does begin anew, since someone looked at it."""
    fresh = conditions.is_true(job.status, conditions.SUSPENDED) and not job.spec.suspend
    before = {} if fresh else {role.name: role.restarts for role in job.status.roles}
    of_driver = observed.driver.restarts if observed.driver and not fresh else {}
    return {
        role.name: max(_seen_restarts(role, world), before.get(role.name, 0), of_driver.get(role.name, 0))
        for role in world.roles
    }


def _seen_restarts(role: RoleView, world: World) -> int:
    if role.kind != "head":
        return role.container_restarts
    # A Job's failed Pods are replaced, not restarted; the last one of a Job that has failed is not replaced.
    failed = int((world.head_job or {}).get("status", {}).get("failed") or 0)
    return max(0, failed - int(_has_condition(world.head_job, "Failed")))


def _user_error(job: RLJob, world: World) -> Verdict | None:
    found = find_user_error(world)
    if found is None:
        return None
    role, pod, termination = found
    # The head's and the trainers' programs name the field themselves; a function's traceback does not.
    kind = role.spec.kind if isinstance(role.spec, RewardBase) else ""
    remedy = f"; mend {role_path(job, role)}.{kind}" if role.kind == REWARD else ""
    return Verdict("failed", USER_ERROR, _describe_end(role.name, pod, termination) + remedy)


def _head_failure(world: World) -> Verdict | None:
    if not _has_condition(world.head_job, "Failed"):
        return None
    head = world.roles[0]
    ended = [(pod, end) for pod in head.pods if (end := last_termination(pod))]
    if not ended:
        reason = _condition(world.head_job, "Failed").get("message") or "its Job failed"
        return Verdict("failed", "HeadFailed", f"head: {reason}")
    pod, end = max(ended, key=lambda pair: str(pair[1].get("finishedAt") or ""))
    return Verdict("failed", "HeadFailed", _describe_end("head", pod, end))


def _exhausted(world: World, restarts: dict[str, int]) -> Verdict | None:
    for role in world.roles:
        limit = role.spec.backoff_limit
        if restarts[role.name] > limit:
            ends = [(pod, end) for pod in role.pods if (end := last_termination(pod))]
            last = f"; last: {_describe_end(role.name, *ends[-1])}" if ends else ""
            return Verdict(
                "failed",
                "BackoffLimitExceeded",
                f"{role.name} was restarted {restarts[role.name]} times, its backoffLimit is {limit}{last}",
            )
    return None


def _describe_end(role: str, pod: Manifest, termination: Manifest) -> str:
    code = termination["exitCode"]
    said = what_it_said(termination.get("message")) or termination.get("reason") or "no message"
    whose = "" if code == int(ExitCode.USER) else f" (see the log of Pod {name_of(pod)})"
    return f"{role} ended with exit code {code}: {said}{whose}"


def _has_condition(manifest: Manifest | None, type_: str) -> bool:
    return bool(_condition(manifest, type_).get("status") == "True")


def _condition(manifest: Manifest | None, type_: str) -> Manifest:
    found = ((manifest or {}).get("status") or {}).get("conditions") or []
    return next((condition for condition in found if condition["type"] == type_), {})
