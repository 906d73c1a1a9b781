"""One look at one job: observe, plan, apply, delete, one status write, then events. Owns the order of the I/O.

Every write may be the last one before a crash: each can be repeated, and the next look begins from what is there.
Backends delete a child with its dependents (a Job's default would leave its Pods behind).
"""

from __future__ import annotations

from datetime import datetime

from rljob_api.errors import UserError
from rljob_api.job import RLJob
from rljob_operator.backend import Backend, JobKey, Observed, Plan, key_of
from rljob_operator.conditions import derive_events
from rljob_operator.defaults import Defaults
from rljob_operator.difference import contains, stamp
from rljob_operator.plan import build_invalid_status, plan


class InvalidJobError(UserError):
    """Raised by a backend's get_job for an object that is no valid RLJob. Carries what is needed to say so in its
    status: `job` has its metadata and old status, and a spec that nobody may look at."""

    def __init__(self, job: RLJob, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.job = job
        self.problems = problems


async def reconcile(backend: Backend, key: JobKey, now: datetime, defaults: Defaults = Defaults()) -> float | None:
    """Converge one job. Returns the seconds after which to look again; None: only when something changes.

    TransientError goes to the caller, which tries again later.
    """
    try:
        job = await backend.get_job(key)
    except InvalidJobError as error:
        await _write_invalid(backend, error.job, error.problems, now)
        return None
    if job is None:
        return None  # its children follow by their owner references
    observed = await backend.observe(job)
    wanted = plan(job, observed, now, defaults=defaults)
    refused = await _apply_children(backend, wanted, observed)
    for child in wanted.delete:
        await backend.delete(key.namespace, child)
    for pod in wanted.ungate:
        await backend.ungate(key.namespace, pod)
    if refused:
        await _write_invalid(backend, job, refused, now)
        return wanted.requeue_after_seconds
    if wanted.status != job.status:
        await backend.update_status(job, wanted.status)
    for event in wanted.events:
        await backend.record_event(job, event)
    if wanted.delete_job:
        await backend.delete_job(key)
    return wanted.requeue_after_seconds


async def _apply_children(backend: Backend, wanted: Plan, observed: Observed) -> list[str]:
    """Apply what differs. Returns what the API server refused for good, such as a user's template."""
    refused = []
    for child in map(stamp, wanted.children):
        if contains(observed.children.get(key_of(child)), child):
            continue
        try:
            await backend.apply(child)
        except UserError as error:
            kind, name = key_of(child)
            refused.append(f"{kind} {name} was refused: {error}")
    return refused


async def _write_invalid(backend: Backend, job: RLJob, problems: list[str], now: datetime) -> None:
    status = build_invalid_status(job, problems, now)
    if status != job.status:
        await backend.update_status(job, status)
    for event in derive_events(job.status, status):
        await backend.record_event(job, event)
