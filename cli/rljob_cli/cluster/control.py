"""suspend, resume and retry: which patch each needs, and what to say. Pure, but for the one patch at the end.

Invariant: a job that is finished, or that another controller manages, is never patched.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from rljob_api.errors import UserError
from rljob_api.wire.contract import ANNOTATION_RETRY
from rljob_cli.cluster.client import Cluster, Manifest
from rljob_cli.cluster.formatting import command, name_job
from rljob_cli.cluster.observation import parse_status
from rljob_operator.plan.conditions import FAILED, REASON_INVALID_SPEC, find
from rljob_operator.plan.lifecycle import MANAGED_BY_US


class Change(NamedTuple):
    """What to patch (None: nothing) and what to tell the user."""

    patch: Manifest | None
    message: str


def plan_suspend(job: Manifest) -> Change:
    _refuse_foreign(job)
    _refuse_finished(job, "suspended")
    if job["spec"].get("suspend"):
        return Change(None, f"{name_job(job)} is suspended already. To go on: {command('resume', job)}")
    return Change(
        {"spec": {"suspend": True}},
        f"{name_job(job)} is being suspended: its Pods go, its checkpoints stay. To go on: {command('resume', job)}",
    )


def plan_resume(job: Manifest) -> Change:
    _refuse_foreign(job)
    _refuse_finished(job, "resumed")
    if not job["spec"].get("suspend"):
        return Change(None, f"{name_job(job)} is not suspended: nothing to do")
    return Change(
        {"spec": {"suspend": False}},
        f"{name_job(job)} is being resumed: its Pods come back, and it goes on from its last checkpoint",
    )


def plan_retry(job: Manifest, now: datetime) -> Change:
    _refuse_foreign(job)
    _refuse_invalid(job)
    phase = _phase(job)
    if phase != "Failed":
        raise UserError(
            f"{name_job(job)}: only a failed job can be retried, and this one is {phase or 'not started yet'}"
        )
    return Change(
        {"metadata": {"annotations": {ANNOTATION_RETRY: now.isoformat()}}},
        f"{name_job(job)} will be tried again from its last checkpoint",
    )


def apply_change(cluster: Cluster, name: str, change: Change) -> None:
    if change.patch is not None:
        cluster.patch_job(name, change.patch)


def describe_change(verb: str, job: Manifest, change: Change) -> dict[str, Any]:
    """For --output json."""
    return {
        "command": verb,
        "namespace": job["metadata"]["namespace"],
        "name": job["metadata"]["name"],
        "changed": change.patch is not None,
        "message": change.message,
    }


def _phase(job: Manifest) -> str:
    return str((job.get("status") or {}).get("phase") or "")


def _refuse_foreign(job: Manifest) -> None:
    manager = job["spec"].get("managedBy")
    if manager not in (None, MANAGED_BY_US):
        raise UserError(f"{name_job(job)}: spec.managedBy is {manager}: change the job there, not here")


def _refuse_invalid(job: Manifest) -> None:
    """A spec that cannot be carried out is no end: the operator looks again as soon as it changes, at nothing else."""
    failed = find(parse_status(job), FAILED)
    if failed is None or failed.status != "True" or failed.reason != REASON_INVALID_SPEC:
        return
    metadata = job["metadata"]
    raise UserError(
        f"{name_job(job)}: its spec cannot be carried out: {failed.message}. Changing the spec is what undoes it: "
        f"kubectl edit rljob {metadata['name']} -n {metadata['namespace']}"
    )


def _refuse_finished(job: Manifest, done: str) -> None:
    _refuse_invalid(job)
    phase = _phase(job)
    if phase not in ("Succeeded", "Failed"):
        return
    remedy = f"To start it again: {command('retry', job)}" if phase == "Failed" else "Apply a job of another name"
    raise UserError(f"{name_job(job)}: has {phase.lower()} and cannot be {done}. {remedy}")
