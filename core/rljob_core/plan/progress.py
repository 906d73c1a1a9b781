"""What the status keeps of the driver's reports: steps, what hangs, what is waited for. Pure.

Invariant: reports that differ only in the time that has passed give the same progress, so that a status is not written
at each poll. Seconds since an event become the time of the event, which stays while the event lasts.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from rljob_api.manifest.status import HungPartStatus, JobProgress, OutageStatus, RewardProblem, ScheduleProgress
from rljob_api.wire.driver_status import DriverStatus, HungPart, Outage, ScheduleStatus
from rljob_core.backend import DRIVER_SILENT
from rljob_core.plan.conditions import find_unheard
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
