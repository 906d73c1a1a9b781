"""What the status keeps of the driver's reports: steps, what hangs, what is waited for. Pure.

Invariant: reports that differ only in the time that has passed give the same progress, so that a status is not written
at each poll. Seconds since an event become the time of the event, which stays while the event lasts.

The condition Progressing of a job that runs says whether steps finish, and else who hangs or is waited for. Nothing
acts on it: the driver replaces what hangs, and ends at its own limits. Invariant: until the moment that
`add_progressing` returns, the time alone does not change the condition.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from rljob_api.manifest.status import (
    HungPartStatus,
    JobProgress,
    OutageStatus,
    RewardProblem,
    RLJobStatus,
    ScheduleProgress,
)
from rljob_api.wire.driver_status import SERVING, DriverStatus, HungPart, Outage, ScheduleStatus
from rljob_core.backend import DRIVER_SILENT
from rljob_core.plan import conditions
from rljob_core.plan.conditions import Reasons, find_unheard
from rljob_core.plan.observed_job import ObservedJob

DONE = "done"
"""The driver's last phase."""
_SAME_EVENT = timedelta(seconds=90)
"""An answer may be a minute old, and clocks differ. A later start is another event."""


def observe_progress(observed: ObservedJob, now: datetime) -> JobProgress:
    """The progress now. Without an answer of the driver, that of the last one."""
    job, driver = observed.job, observed.state.driver
    before = job.status.progress
    if driver is not None:
        return _read_report(before, driver, driver.total_steps or job.spec.num_steps, now)
    progress = before.model_copy(update={"total_steps": job.spec.num_steps})
    head, problem = observed.roles[0], observed.state.driver_problem
    if problem.startswith(DRIVER_SILENT) and head.ready < head.desired:
        problem = ""
    return progress.model_copy(update={"waits_for": problem}) if problem or find_unheard(progress) else progress


def end_progress(progress: JobProgress) -> JobProgress:
    """The progress of a job without Pods: nothing hangs, and nothing is waited for."""
    return progress.model_copy(update={"hung": [], "outages": []})


def _read_report(before: JobProgress, driver: DriverStatus, total_steps: int, now: datetime) -> JobProgress:
    share = driver.training_share
    return JobProgress(
        run_id=driver.run_id or before.run_id,
        step=driver.step,
        total_steps=total_steps,
        reward=None if driver.reward is None else round(driver.reward, 4),  # a printed column
        weight_version=driver.weight_version,
        last_step_time=_find_last_step(before, driver, now),
        hung=[_keep_part(part, before.hung, now) for part in driver.hung],
        outages=[_keep_outage(outage, before.outages, now) for outage in driver.outages],
        training_share=None if share is None else round(share, 2),
        phase=driver.phase,
        waits_for=driver.waits_for,
        problems=[RewardProblem.of(problem) for problem in driver.problems],
        schedule=summarize_schedule(driver.schedule),
    )


def summarize_schedule(schedule: ScheduleStatus) -> ScheduleProgress | None:
    """None if the driver has not reported it: it starts, or is older."""
    if schedule == ScheduleStatus():
        return None
    return ScheduleProgress(
        prefix_hits=schedule.prefix_hits,
        type=schedule.type,
        staleness=schedule.staleness,
        groups_in_flight=schedule.groups_in_flight,
        groups_scored=schedule.groups_scored,
        groups_due=schedule.groups_due,
        busy=schedule.busy.describe(),  # a printed column
    )


def _find_last_step(before: JobProgress, driver: DriverStatus, now: datetime) -> datetime | None:
    """The time changes with each step that is counted, and only then. The return to a checkpoint counts none."""
    is_new_run = driver.run_id not in ("", before.run_id)
    known = None if is_new_run else before.last_step_time
    is_counted = driver.step > (0 if known is None else before.step)
    if driver.since_step_seconds is None or not is_counted:
        return known
    return _subtract(now, driver.since_step_seconds)


def _keep_part(part: HungPart, known: Iterable[HungPartStatus], now: datetime) -> HungPartStatus:
    since = _subtract(now, part.seconds)
    for old in known:
        if (old.role, old.name) == (part.role, part.name) and since - old.since < _SAME_EVENT:
            since = old.since
    limit = round(part.limit_seconds)
    return HungPartStatus(
        role=part.role, name=part.name, since=since, limit_seconds=limit, doing=part.doing, action=part.action
    )


def _keep_outage(outage: Outage, known: Iterable[OutageStatus], now: datetime) -> OutageStatus:
    """Each attempt may fail differently, so the first message stays."""
    since, limit = _subtract(now, outage.seconds), round(outage.limit_seconds)
    for old in known:
        if old.what == outage.what and since - old.since < _SAME_EVENT:
            return old.model_copy(update={"limit_seconds": limit})
    return OutageStatus(what=outage.what, since=since, limit_seconds=limit, message=outage.message)


def _subtract(now: datetime, seconds: float) -> datetime:
    return (now - timedelta(seconds=seconds)).replace(microsecond=0)


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
_SERVING = "Serving"
"""Reason while a training service answers; the message says whom it serves."""
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
    limit = None if uncounted or driver.phase in (DONE, SERVING) else _find_limit(observed, driver)
    seconds = _count_seconds(observed, driver, progress, now)
    named = [*map(describe_part, progress.hung), *map(describe_outage, progress.outages)]
    if limit is not None and seconds >= limit:
        message = _describe_deadline(observed, driver, progress, limit)
        return _Verdict(False, conditions.REASON_DEADLINE_EXCEEDED, "; ".join([*named, message]))
    until = None if limit is None or progress.outages else now + timedelta(seconds=limit - seconds)
    if named:
        return _Verdict(False, PART_HUNG if progress.hung else WAITS_FOR_OUTAGE, "; ".join(named), until)
    if driver.phase == SERVING:
        return _Verdict(True, _SERVING, driver.waits_for)
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
