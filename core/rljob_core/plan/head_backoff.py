"""When the head's Job is replaced so that its backoff forgets failures before the window. Pure.

Kubernetes doubles the delay before a Job's next Pod with each failure in the Job's life, up to 10 minutes; only a new
Job starts again. Invariants: a failure is in the status before its Pod is deleted with the Job; a Pod that may run is
never deleted; each new Job needs a new failure that counts against backoffLimit.
"""

from datetime import datetime

from rljob_core.backend import Event, Manifest
from rljob_core.children import keep
from rljob_core.children.common import HEAD
from rljob_core.children.gang import keep_gang
from rljob_core.plan.failures import Failures, count_charged
from rljob_core.plan.observed_job import ObservedJob, name_of

REASON = "HeadBackoffReset"
"""Reason of the event."""


def has_old_failures(observed: ObservedJob, built: Manifest, failures: Failures, now: datetime) -> bool:
    """Whether the head has failed and its Job counts more failures than the window. `built` is the Job as this operator
    builds it. One of an earlier operator stays: its successor could not keep what runs."""
    role, running = observed.roles[0], observed.head_job
    if running is None or role.terminating or keep.is_outdated(keep.record_built(keep_gang(built, running)), running):
        return False
    if any(pod.get("status", {}).get("phase") != "Failed" for pod in role.pods):
        return False
    num, last = count_charged(role, failures[HEAD], now)
    newest = max(role.pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""), default=None)
    is_charged = newest is not None and last is not None and last.pod == name_of(newest)
    return is_charged and int((running.get("status") or {}).get("failed") or 0) > num


def is_stored(observed: ObservedJob, failures: Failures) -> bool:
    """Whether the status has all failures of the head."""
    stored = next((role.failures for role in observed.job.status.roles if role.name == HEAD), [])
    return stored == failures[HEAD]


def reset_event() -> Event:
    message = (
        "the head's earlier failures are older than head.backoffWindowSeconds: its Job is replaced, so that the next "
        "Pod starts without their delay; the logs of failed Pods are deleted"
    )
    return Event("Normal", REASON, message)
