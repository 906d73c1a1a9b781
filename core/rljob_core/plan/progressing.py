"""The condition Progressing of a job that runs: whether steps finish, and else who hangs or is waited for. Pure.

Nothing acts on the condition: the driver replaces what hangs, and ends at its own limits. Invariant: until the moment
that `add_progressing` returns, the time alone does not change the condition.
"""

from datetime import datetime, timedelta
from typing import NamedTuple

from rljob_api.manifest.status import HungPartStatus, JobProgress, OutageStatus, RLJobStatus
from rljob_api.wire.driver_status import DriverStatus
from rljob_core.plan import conditions
from rljob_core.plan.conditions import Reasons
from rljob_core.plan.observed_job import ObservedJob
from rljob_core.plan.progress import DONE

FIELD = "spec.progressDeadlineSeconds"
STEP_FINISHED = "StepFinished"
TRAINING = "Training"
"""Reason before the first step."""
PART_HUNG = "PartHung"
WAITS_FOR_OUTAGE = "WaitsForOutage"
NO_PROGRESS = (conditions.REASON_DEADLINE_EXCEEDED, PART_HUNG, WAITS_FOR_OUTAGE)
"""Reasons for which the condition is False, and of the events that say so."""
_STARTING = "DriverStarting"
_NOT_READY = "HeadNotReady"
_UNTIL_STEP = "no step has finished yet"


class _Verdict(NamedTuple):
    holds: bool | None
    """None: unknown."""
    reason: str
    message: str
    until: datetime | None = None
    """When the time alone may make it False."""


def add_progressing(
    observed: ObservedJob,
    progress: JobProgress,
    now: datetime,
    true: Reasons,
    false_reasons: Reasons,
    unknown: Reasons,
) -> datetime | None:
    """Add the condition of a job that runs to one of the three. Return when the time alone may change it."""
    if conditions.QUEUED in true or not true.keys() & {conditions.RUNNING, conditions.RESTARTING}:
        return None
    driver = observed.state.driver
    verdict = _judge_silence(observed, progress) if driver is None else _judge(observed, driver, progress, now)
    chosen = unknown if verdict.holds is None else true if verdict.holds else false_reasons
    chosen[conditions.PROGRESSING] = (verdict.reason, verdict.message)
    return verdict.until


def find_stalls(status: RLJobStatus) -> frozenset[str]:
    """All reasons for which the condition is False, its own first; if the driver does not answer, that."""
    condition = conditions.find(status, conditions.PROGRESSING)
    if condition is None or condition.status != "False":
        return frozenset({condition.reason} & {*conditions.UNHEARD.values()} if condition else ())
    reasons = {condition.reason}
    reasons |= {PART_HUNG} if status.progress.hung else set()
    reasons |= {WAITS_FOR_OUTAGE} if status.progress.outages else set()
    return frozenset(reasons)


def describe_part(part: HungPartStatus) -> str:
    """Who hangs, since when, why, and what is done about it."""
    parts = [f"{part.role}: {part.name} hangs since {_format(part.since)} (limit {part.limit_seconds} s)"]
    return "; ".join(filter(None, [*parts, part.doing, part.action]))


def describe_outage(outage: OutageStatus) -> str:
    """What is waited for, since when, until when, and why."""
    until = _format(outage.since + timedelta(seconds=outage.limit_seconds))
    parts = [f"waits for {outage.what}, which fails since {_format(outage.since)}", outage.message]
    return "; ".join(filter(None, [*parts, f"the job fails at {until} (spec.outageSeconds)"]))


def _judge_silence(observed: ObservedJob, progress: JobProgress) -> _Verdict:
    """Without an answer. A driver that misses one, or ends, changes nothing."""
    if reason := conditions.find_unheard(progress):
        return _Verdict(None, reason, progress.waits_for)
    head, old = observed.roles[0], conditions.find(observed.job.status, conditions.PROGRESSING)
    if head.ready < head.desired and progress.phase != DONE:
        return _Verdict(None, _NOT_READY, "the head is not ready")
    if old is None or old.reason == _NOT_READY:
        return _Verdict(None, _STARTING, "the driver has not answered yet")
    return _Verdict({"True": True, "False": False}.get(old.status), old.reason, old.message)


def _judge(observed: ObservedJob, driver: DriverStatus, progress: JobProgress, now: datetime) -> _Verdict:
    # The count stands still during an outage: a driver that starts has no count, and the time is none.
    uncounted = progress.outages and driver.since_step_seconds is None
    limit = None if uncounted or driver.phase == DONE else _find_limit(observed, driver)
    seconds = _count_seconds(observed, driver, progress, now)
    named = [*map(describe_part, progress.hung), *map(describe_outage, progress.outages)]
    if limit is not None and seconds >= limit:
        message = _describe_deadline(observed, driver, progress, limit)
        return _Verdict(False, conditions.REASON_DEADLINE_EXCEEDED, "; ".join([*named, message]))
    until = None if limit is None or progress.outages else now + timedelta(seconds=limit - seconds)
    if named:
        return _Verdict(False, PART_HUNG if progress.hung else WAITS_FOR_OUTAGE, "; ".join(named), until)
    message = "" if limit is None else f"it becomes False after {limit:.0f} s without a step"
    return _Verdict(True, STEP_FINISHED if progress.last_step_time else TRAINING, message, until)


def _find_limit(observed: ObservedJob, driver: DriverStatus) -> float | None:
    own = observed.job.spec.progress_deadline_seconds
    return driver.step_limit_seconds if own is None else own


def _count_seconds(observed: ObservedJob, driver: DriverStatus, progress: JobProgress, now: datetime) -> float:
    """Seconds without a step. While the driver starts it reports none: since the job runs, or the last step."""
    if driver.since_step_seconds is not None:
        return driver.since_step_seconds
    times = [moment for moment in (observed.job.status.active_since, progress.last_step_time) if moment]
    return max(0.0, (now - max(times)).total_seconds()) if times else 0.0


def _describe_deadline(observed: ObservedJob, driver: DriverStatus, progress: JobProgress, limit: float) -> str:
    last = progress.last_step_time
    since = f"no step has finished since {_format(last)}" if last else _UNTIL_STEP
    own = observed.job.spec.progress_deadline_seconds
    why = f"{FIELD} is {limit:.0f}" if own is not None else f"the job's own steps allow {limit:.0f} s"
    # Not what it waits for, which may change at each poll: a changed message is an event.
    return f"{since}, and {why}; the driver's phase is {driver.phase}; if a step may take longer, raise {FIELD}"


def _format(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
