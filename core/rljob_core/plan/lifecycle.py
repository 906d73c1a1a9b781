"""The state of a job: one decision from its spec, its status and what was observed.

Decides only, for jobs whose end is not stored yet. The checks are ordered: an observed end counts before the spec, and
a user error before any retry.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RoleStatus
from rljob_api.wire.contract import ANNOTATION_RETRY, MANAGED_BY, ExitCode
from rljob_core.backend import ChildKey, Manifest, ObservedState, Owner
from rljob_core.children import POD_KINDS, sort_deletions
from rljob_core.children.common import HEAD, SERVING, TRAINER, child_name
from rljob_core.plan import active_time, conditions, observed_job
from rljob_core.plan.failures import Failures, count_charged
from rljob_core.plan.observed_job import ObservedJob, RoleView
from rljob_core.plan.run_files import describe_success

State = Literal["suspended", "succeeded", "failed", "active"]
MANAGED_BY_US = f"rljob.dev/{MANAGED_BY}"
"""spec.managedBy of jobs of this operator; the same as leaving it out."""
USER_ERROR = "UserError"
"""Reason of a failure that only the user can fix."""
HEAD_FAILED = "HeadFailed"


@dataclass(frozen=True)
class LifecycleDecision:
    """The state; for an end, also its reason and message."""

    state: State
    reason: str = ""
    message: str = ""


def is_managed(job: RLJob) -> bool:
    """Whether this operator acts on the job. If its deletion waits for no finalizer, the garbage collector does."""
    deleted = (job.metadata.model_extra or {}).get("deletionTimestamp")
    return job.spec.managed_by in (None, MANAGED_BY_US) and (not deleted or bool(find_finalizers(job)))


def find_finalizers(job: RLJob) -> list[str]:
    """The finalizers of others for which the deletion of the job waits."""
    extra = job.metadata.model_extra or {}
    found = extra.get("finalizers") or []
    if not extra.get("deletionTimestamp") or "orphan" in found:  # --cascade=orphan keeps the Pods
        return []
    return [finalizer for finalizer in found if finalizer != "foregroundDeletion"]


def has_been_running(job: RLJob) -> bool:
    """Whether the job has been Running since its workloads were created."""
    return conditions.is_true(job.status, conditions.RUNNING) or conditions.is_true(job.status, conditions.RESTARTING)


def requested_retry(job: RLJob) -> str:
    """The value of the retry annotation; without one, the value of the last retry."""
    return job.metadata.annotations.get(ANNOTATION_RETRY) or job.status.retried


def should_retry(job: RLJob) -> bool:
    """Whether the job has failed permanently and must start again: the annotation has a new value, or the failure was a
    user error and the spec has changed since."""
    failed = conditions.find(job.status, conditions.FAILED)
    if failed is None or failed.status != "True" or not conditions.is_finished(job.status):
        return False
    is_changed = failed.reason == USER_ERROR and failed.observed_generation < job.metadata.generation
    return is_changed or requested_retry(job) != job.status.retried


def decide_lifecycle(observed: ObservedJob, failures: Failures, now: datetime) -> LifecycleDecision:
    """The state now. `failures` are those that the status will record."""
    job = observed.job
    if observed_job.has_condition(observed.head_job, "Complete"):
        return LifecycleDecision("succeeded", "JobSucceeded", describe_success(observed))
    if failure := _user_error(observed) or _head_failure(observed) or _backoff_limit_exceeded(observed, failures, now):
        return failure
    if job.spec.suspend:
        return LifecycleDecision("suspended")
    if active_time.is_past_deadline(job, now):
        message = f"ran longer than spec.activeDeadlineSeconds ({job.spec.active_deadline_seconds} s)"
        return LifecycleDecision("failed", "DeadlineExceeded", message)
    return LifecycleDecision("active")


def find_left_by_head(owner: Owner, observed: ObservedState) -> tuple[ChildKey, ...]:
    """The workloads of a job whose head has ended. Its spec, which may be unreadable, does not matter."""
    owned, blocked = observed_job.find_owned_children(owner, observed)
    head = ChildKey("Job", child_name(owner, HEAD))
    if not any(observed_job.has_condition(owned.get(head), type_) for type_ in ("Complete", "Failed")):
        return ()
    return tuple(sort_deletions({key for key in owned if key.kind in POD_KINDS} - blocked - {head}))


def expiry_of(job: RLJob) -> datetime | None:
    """When ttlSecondsAfterFinished have passed."""
    seconds, end = job.spec.ttl_seconds_after_finished, job.status.completion_time
    return end + timedelta(seconds=seconds) if seconds is not None and end else None


def count_restarts(observed: ObservedJob) -> dict[str, int]:
    """Restarts per role, for whatever reason. They never decrease, although a replaced Pod counts from zero, except
    after a suspension."""
    job, driver = observed.job, observed.state.driver
    is_resumed = conditions.is_true(job.status, conditions.SUSPENDED) and not job.spec.suspend
    before = {} if is_resumed else {role.name: _stored_restarts(role) for role in job.status.roles}
    reported = driver.restarts if driver and not is_resumed else {}
    return {
        role.name: max(_observed_restarts(role, observed), before.get(role.name, 0), reported.get(role.name, 0))
        for role in observed.roles
    }


def _observed_restarts(role: RoleView, observed: ObservedJob) -> int:
    counts = [observed_job.count_restarts(pod) for pod in role.pods]
    if role.kind == TRAINER:  # all trainers rejoin after the head was replaced: one restart of the group
        return max(counts, default=0)
    if role.kind != HEAD:
        return sum(counts)
    # A Job replaces its failed Pods instead of restarting them. It does not replace the last one when it fails.
    failed = int((observed.head_job or {}).get("status", {}).get("failed") or 0)
    return max(0, failed - int(observed_job.has_condition(observed.head_job, "Failed")))


def _stored_restarts(role: RoleStatus) -> int:
    """A new Job of the head counts from zero, so what was recorded counts, too."""
    return max(role.restarts, sum(record.counted for record in role.failures) if role.name == HEAD else 0)


def _user_error(observed: ObservedJob) -> LifecycleDecision | None:
    for role in observed.roles:
        for pod, end in _ended_pods(role):
            if end["exitCode"] == int(ExitCode.USER):
                # Head, trainers and rollouts name the field in their message; the traceback of a function does not.
                remedy = f"; fix {role.source}" if role.kind in SERVING else ""
                return LifecycleDecision("failed", USER_ERROR, _describe_end(role.name, pod, end) + remedy)
    return None


def _head_failure(observed: ObservedJob) -> LifecycleDecision | None:
    if not observed_job.has_condition(observed.head_job, "Failed"):
        return None
    if ended := _ended_pods(observed.roles[0]):
        pod, end = max(ended, key=lambda pair: str(pair[1].get("finishedAt") or ""))
        return LifecycleDecision("failed", HEAD_FAILED, _describe_end(HEAD, pod, end))
    reason = observed_job.find_condition(observed.head_job, "Failed").get("message") or "its Job failed"
    return LifecycleDecision("failed", HEAD_FAILED, f"head: {reason}")


def _backoff_limit_exceeded(observed: ObservedJob, failures: Failures, now: datetime) -> LifecycleDecision | None:
    for role in observed.roles:
        limit, window = role.spec.backoff_limit, role.spec.backoff_window
        num, last = count_charged(role, failures[role.name], now)
        if last is None or num <= limit:
            continue
        who = {HEAD: "the head", TRAINER: "the trainers"}.get(role.kind, f"Pod {last.pod} of {role.name}")
        message = (
            f"{who} failed {num} times within {window.total_seconds():.0f} s, and {role.path}.backoffLimit is {limit}; "
            f"last: {last.last} (see the log of Pod {last.pod})"
        )
        return LifecycleDecision("failed", HEAD_FAILED if role.kind == HEAD else "BackoffLimitExceeded", message)
    return None


def _ended_pods(role: RoleView) -> list[tuple[Manifest, Manifest]]:
    """The Pods with a failed container, and how it ended."""
    return [(pod, end) for pod in role.pods if (end := observed_job.last_termination(pod))]


def _describe_end(role: str, pod: Manifest, termination: Manifest) -> str:
    code = termination["exitCode"]
    error = observed_job.extract_error_message(termination.get("message"))
    if error and code == int(ExitCode.USER):
        return f"{role}: {error}"
    error = error or termination.get("reason") or "no message"
    return f"{role} ended with exit code {code}: {error} (see the log of Pod {observed_job.name_of(pod)})"
