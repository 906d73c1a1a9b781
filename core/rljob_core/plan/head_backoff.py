"""When the head's Job is replaced so that the next Pod starts without the delay of earlier failures. Pure.

Kubernetes doubles the delay before a Job's next Pod with each failure in the Job's life, from 10 s to 10 minutes: only
a new Job starts again. It is replaced when a head fails that finished a step, since that is no crash loop; or when the
Job counts failures older than the window. What ends a job is head.backoffLimit, which no replacement touches.
Invariants: a failure is in the status before its Pod is deleted with the Job; a Pod that may run is never deleted; each
new Job needs a new failure that counts against backoffLimit.
"""

from datetime import datetime
from typing import Literal

from rljob_core.backend import Event, Manifest
from rljob_core.children import keep
from rljob_core.children.common import HEAD
from rljob_core.children.gang import keep_gang
from rljob_core.plan.failures import Failures, count_charged, last_end
from rljob_core.plan.observed_job import ObservedJob, name_of

REASON = "HeadBackoffReset"
"""Reason of the event."""
_MAX_END_LENGTH = 700
"""Characters of the last lines in the event, which has at most 1024."""
Why = Literal["", "progress", "age"]
_BECAUSE: dict[Why, str] = {
    "progress": "the head has finished a step since its start",
    "age": "the head's earlier failures are older than head.backoffWindowSeconds",
}


def why_reset(observed: ObservedJob, built: Manifest, failures: Failures, now: datetime) -> Why:
    """Why the Job of a head that failed is replaced; empty: it is not. `built` is the Job as this operator builds it.
    One of an earlier operator stays: its successor could not keep what runs."""
    role, running = observed.roles[0], observed.head_job
    if running is None or role.terminating or keep.is_outdated(keep.record_built(keep_gang(built, running)), running):
        return ""
    if any(pod.get("status", {}).get("phase") != "Failed" for pod in role.pods):
        return ""
    num, last = count_charged(role, failures[HEAD], now)
    newest, num_failed = _find_newest(observed), int((running.get("status") or {}).get("failed") or 0)
    if newest is None or last is None or last.pod != name_of(newest) or not num_failed:
        return ""
    return "progress" if _made_progress(observed, newest) else "age" if num_failed > num else ""


def is_stored(observed: ObservedJob, failures: Failures) -> bool:
    """Whether the status has all failures of the head."""
    stored = next((role.failures for role in observed.job.status.roles if role.name == HEAD), [])
    return stored == failures[HEAD]


def reset_event(observed: ObservedJob, why: Why) -> Event:
    """The failed Pods are deleted with their logs, so it has the end of the last one."""
    message = (
        f"{_BECAUSE[why]}: its Job is replaced, so that the next Pod starts without delay; failed Pods are deleted"
    )
    if (newest := _find_newest(observed)) is not None:
        end = last_end(newest)
        text = (end.get("message") or "").strip()[-_MAX_END_LENGTH:]
        message += f"; the last one, {name_of(newest)}, ended with exit code {end.get('exitCode')}"
        message += f": {text}" if text else ""
    return Event("Normal", REASON, message)


def _find_newest(observed: ObservedJob) -> Manifest | None:
    heads = observed.roles[0].pods
    return max(heads, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""), default=None)


def _made_progress(observed: ObservedJob, pod: Manifest) -> bool:
    """Whether a step was counted since the Pod's container started: a first one, not one that was repeated."""
    started, step = last_end(pod).get("startedAt"), observed.job.status.progress.last_step_time
    return started is not None and step is not None and step > datetime.fromisoformat(str(started))
