"""suspend, resume and retry: which patch each needs, and what to say. Pure, but for the one patch at the end.

Invariant: a job that is finished, or that another controller manages, is never patched.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from rljob_api.contract import ANNOTATION_RETRY
from rljob_api.errors import UserError
from rljob_cli.cluster.client import Cluster, Manifest
from rljob_operator.lifecycle import MANAGED_BY_US


class Change(NamedTuple):
    """What to patch (None: nothing) and what to tell the user."""

    patch: Manifest | None
    message: str


def plan_suspend(job: Manifest) -> Change:
    _refuse_foreign(job)
    _refuse_finished(job, "suspended")
    if job["spec"].get("suspend"):
        return Change(None, f"{_name(job)} is suspended already. To go on: {_command('resume', job)}")
    return Change(
        {"spec": {"suspend": True}},
        f"{_name(job)} is being suspended: its Pods go, its checkpoints stay. To go on: {_command('resume', job)}",
    )


def plan_resume(job: Manifest) -> Change:
    _refuse_foreign(job)
    _refuse_finished(job, "resumed")
    if not job["spec"].get("suspend"):
        return Change(None, f"{_name(job)} is not suspended: nothing to do")
    return Change(
        {"spec": {"suspend": False}},
        f"{_name(job)} is being resumed: its Pods come back, and it goes on from its last checkpoint",
    )


def plan_retry(job: Manifest, now: datetime) -> Change:
    _refuse_foreign(job)
    phase = _phase(job)
    if phase != "Failed":
        raise UserError(f"{_name(job)}: only a failed job can be retried, and this one is {phase or 'not started yet'}")
    return Change(
        {"metadata": {"annotations": {ANNOTATION_RETRY: now.isoformat()}}},
        f"{_name(job)} will be tried again from its last checkpoint",
    )


def apply_change(cluster: Cluster, name: str, change: Change) -> int:
    if change.patch is not None:
        cluster.patch_job(name, change.patch)
    print(change.message)
    return 0


def _phase(job: Manifest) -> str:
    return str(job.get("status", {}).get("phase") or "")


def _name(job: Manifest) -> str:
    return f"RLJob {job['metadata']['namespace']}/{job['metadata']['name']}"


def _command(verb: str, job: Manifest) -> str:
    return f"kubectl rljob {verb} {job['metadata']['name']} -n {job['metadata']['namespace']}"


def _refuse_foreign(job: Manifest) -> None:
    manager = job["spec"].get("managedBy")
    if manager not in (None, MANAGED_BY_US):
        raise UserError(f"{_name(job)}: spec.managedBy is {manager}: change the job there, not here")


def _refuse_finished(job: Manifest, done: str) -> None:
    phase = _phase(job)
    if phase not in ("Succeeded", "Failed"):
        return
    remedy = f"To start it again: {_command('retry', job)}" if phase == "Failed" else "Apply a job of another name"
    raise UserError(f"{_name(job)}: has {phase.lower()} and cannot be {done}. {remedy}")
