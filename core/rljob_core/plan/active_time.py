"""How long a job has run: the time that spec.activeDeadlineSeconds limits. Pure.

A job runs while its condition Running or Restarting is True and it is not Queued (Kueue may preempt a running job). The
status has the seconds of the ended periods and the start of the current one, so nothing is written while time passes,
and a restarted operator continues the count. Invariant: a clock that was set changes the count by at most that step,
and never below the ended periods.
"""

from datetime import datetime, timedelta

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RLJobStatus
from rljob_core.plan import conditions

RESET = {"active_seconds": 0, "active_since": None}
"""The update of a status that starts the count again."""


def account(old: RLJobStatus, new: RLJobStatus, now: datetime) -> RLJobStatus:
    """`new`, whose conditions are those of now, with the start or the end of a period. `old` is the stored status."""
    if _running_since(new):
        # An old status that ran without a start is of an operator that did not count yet.
        since = min(new.active_since or _running_since(old) or now, now)
        return new.model_copy(update={"active_since": since})
    if new.active_since is None:
        return new
    return new.model_copy(update={"active_seconds": active_seconds(new, now), "active_since": None})


def active_seconds(status: RLJobStatus, now: datetime) -> int:
    """Seconds for which the job has run, up to now."""
    since = status.active_since
    return status.active_seconds + (max(0, int((now - since).total_seconds())) if since else 0)


def is_past_deadline(job: RLJob, now: datetime) -> bool:
    limit = job.spec.active_deadline_seconds
    return limit is not None and active_seconds(job.status, now) >= limit


def deadline_of(job: RLJob, status: RLJobStatus) -> datetime | None:
    """When activeDeadlineSeconds will have passed if the job runs on; None without a limit, and while it does not."""
    limit, since = job.spec.active_deadline_seconds, status.active_since
    return since + timedelta(seconds=limit - status.active_seconds) if limit and since else None


def _running_since(status: RLJobStatus) -> datetime | None:
    if conditions.is_true(status, conditions.QUEUED):
        return None
    running = [c for c in status.conditions if c.type in (conditions.RUNNING, conditions.RESTARTING)]
    return next((c.last_transition_time for c in running if c.status == "True"), None)
