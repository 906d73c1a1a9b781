"""One look at one job: observe, plan, apply, delete, one status write, then events. Owns the order of the I/O.

Every write may be the last one before a crash: each can be repeated, and the next look begins from what is there.
What Pods read or are guarded by is applied before them, and where its name is someone else's no Pods are made.
Backends delete a child with its dependents (a Job's default would leave its Pods behind).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_operator.backend import Backend, Event, ForeignObjectError, JobKey, Manifest, Observed, Plan, key_of
from rljob_operator.children import WORKLOAD_KINDS
from rljob_operator.defaults import DEFAULTS, Defaults
from rljob_operator.plan.conditions import conflict_events, derive_events, with_conflicts
from rljob_operator.plan.difference import contains, stamp
from rljob_operator.plan.job import build_invalid_status, build_waiting_status, plan
from rljob_operator.plan.lifecycle import is_ours_to_manage

OnNothingWritten = Callable[[RLJob, Observed, Plan], None]

CONFLICT_SECONDS = 30.0
"""How soon to try a name again that someone else's object has: nothing tells when that object goes."""
REASON_FORBIDDEN = "Forbidden"


class InvalidJobError(UserError):
    """Raised by a backend's get_job for an object that is no valid RLJob. Carries what is needed to say so in its
    status: `job` has its metadata and old status, and a spec that nobody may look at."""

    def __init__(self, job: RLJob, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.job = job
        self.problems = problems


class ForbiddenError(TransientError):
    """RBAC, a quota or a policy does not let the operator do something. Tried again, as somebody may grant it; events
    say what, and the condition Running of a job that does not run."""


async def reconcile(
    backend: Backend,
    key: JobKey,
    now: datetime,
    defaults: Defaults = DEFAULTS,
    *,
    on_nothing_written: OnNothingWritten = lambda job, observed, wanted: None,
) -> float | None:
    """Converge one job. Returns the seconds after which to look again; None: only when something changes.
    `on_nothing_written` is called with what was read and decided when all was already so.

    TransientError goes to the caller, which tries again later.
    """
    try:
        job = await backend.get_job(key)
    except InvalidJobError as error:
        await _write_invalid(backend, error.job, error.problems, now)
        return None
    if job is None or not is_ours_to_manage(job):
        return None  # the children of one that is gone follow by their owner references
    try:
        return await _converge(backend, job, now, defaults, on_nothing_written)
    except ForbiddenError as error:
        with contextlib.suppress(TransientError):  # Events may be forbidden as well
            await backend.record_event(job, Event("Warning", REASON_FORBIDDEN, str(error)))
        with contextlib.suppress(TransientError, UserError):
            status = build_waiting_status(job, REASON_FORBIDDEN, str(error), now)
            if status != job.status:
                await backend.update_status(job, status)
        raise


async def _converge(
    backend: Backend, job: RLJob, now: datetime, defaults: Defaults, on_nothing_written: OnNothingWritten
) -> float | None:
    key = JobKey(job.metadata.namespace, job.metadata.name)
    observed = await backend.observe(job)
    wanted = plan(job, observed, now, defaults=defaults)
    differing = _find_differing(wanted, observed)
    conflicts, refused = await _apply_children(backend, differing)
    for child in wanted.delete:
        await backend.delete(key.namespace, child)
    for pod in wanted.ungate:
        await backend.ungate(key.namespace, pod)
    if refused:
        await _write_invalid(backend, job, refused, now)
        return wanted.requeue_after_seconds
    status = with_conflicts(wanted.status, conflicts, now)
    if status != job.status:
        await backend.update_status(job, status)
    events = (*wanted.events, *conflict_events(job.status, status))
    for event in events:
        await backend.record_event(job, event)
    if wanted.delete_job:
        await backend.delete_job(key)
    if conflicts:
        return min(CONFLICT_SECONDS, wanted.requeue_after_seconds or CONFLICT_SECONDS)
    writes = (*differing, *wanted.delete, *wanted.ungate, *events)
    if not writes and status == job.status and not wanted.delete_job:
        on_nothing_written(job, observed, wanted)
    return wanted.requeue_after_seconds


class _Applied(NamedTuple):
    conflicts: list[str]
    """Children whose name someone else's object has."""
    refused: list[str]
    """What the API server refused for good, such as a user's template."""


def _find_differing(wanted: Plan, observed: Observed) -> list[Manifest]:
    """The children, stamped, that are not yet as they should be."""
    return [c for c in map(stamp, wanted.children) if not contains(observed.children.get(key_of(c)), c)]


async def _apply_children(backend: Backend, differing: list[Manifest]) -> _Applied:
    """First all that Pods need, at once, then the workloads, at once."""
    applied = _Applied([], [])
    for of_workloads in (False, True):
        if applied.conflicts:
            break  # Pods must not start from someone else's Secret, or without their policy
        group = [child for child in differing if (child["kind"] in WORKLOAD_KINDS) == of_workloads]
        outcomes = await asyncio.gather(*(backend.apply(child) for child in group), return_exceptions=True)
        _record_outcomes(applied, group, outcomes)
    return applied


def _record_outcomes(applied: _Applied, group: list[Manifest], outcomes: list[BaseException | None]) -> None:
    """Raises the first error that is no refusal, after all of the group have ended."""
    for child, outcome in zip(group, outcomes, strict=True):
        kind, name = key_of(child)
        if isinstance(outcome, ForeignObjectError):
            applied.conflicts.append(f"{kind} {name}")
        elif isinstance(outcome, UserError):
            applied.refused.append(f"{kind} {name} was refused: {outcome}")
        elif outcome is not None:
            raise outcome


async def _write_invalid(backend: Backend, job: RLJob, problems: list[str], now: datetime) -> None:
    status = build_invalid_status(job, problems, now)
    if status != job.status:
        await backend.update_status(job, status)
    for event in derive_events(job.status, status):
        await backend.record_event(job, event)
