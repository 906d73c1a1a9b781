"""suspend, resume and retry: their patches and messages. Pure.

Invariant: a job that is finished, or that another controller manages, is never patched.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from rljob_api.errors import UserError
from rljob_api.wire.contract import ANNOTATION_RETRY
from rljob_cli.cluster.formatting import format_job_name, kubectl_command
from rljob_cli.cluster.observation import parse_status
from rljob_operator.backend import Manifest
from rljob_operator.plan.conditions import FAILED, REASON_INVALID_SPEC, find
from rljob_operator.plan.lifecycle import MANAGED_BY_US


class Change(NamedTuple):
    """The patch (None: there is nothing to change) and the message for the user."""

    patch: Manifest | None
    message: str


def plan_change(verb: str, job: Manifest, now: datetime) -> Change:
    if verb == "retry":
        return plan_retry(job, now)
    return plan_suspend(job) if verb == "suspend" else plan_resume(job)


def plan_suspend(job: Manifest) -> Change:
    _refuse_foreign(job)
    _refuse_finished(job, "suspended")
    name, resume = format_job_name(job), kubectl_command("resume", job)
    if job["spec"].get("suspend"):
        return Change(None, f"{name} is already suspended; to resume: {resume}")
    message = f"{name} is being suspended: its Pods are deleted, its checkpoints stay; to resume: {resume}"
    return Change({"spec": {"suspend": True}}, message)


def plan_resume(job: Manifest) -> Change:
    _refuse_foreign(job)
    _refuse_finished(job, "resumed")
    name = format_job_name(job)
    if not job["spec"].get("suspend"):
        return Change(None, f"{name} is not suspended: nothing to do")
    message = f"{name} is being resumed: its Pods are created again, and it resumes from its last checkpoint"
    return Change({"spec": {"suspend": False}}, message)


def plan_retry(job: Manifest, now: datetime) -> Change:
    _refuse_foreign(job)
    _refuse_invalid(job)
    name, phase = format_job_name(job), _phase(job)
    if phase != "Failed":
        raise UserError(f"{name}: only a failed job can be retried; this one is {phase or 'not started yet'}")
    patch = {"metadata": {"annotations": {ANNOTATION_RETRY: now.isoformat()}}}
    return Change(patch, f"{name} will be retried from its last checkpoint")


def describe_change(verb: str, job: Manifest, change: Change) -> dict[str, Any]:
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
        raise UserError(f"{format_job_name(job)}: spec.managedBy is {manager}; change the job through that controller")


def _refuse_invalid(job: Manifest) -> None:
    """A job with an invalid spec is not finished: the operator reconciles it as soon as its spec changes."""
    failed = find(parse_status(job), FAILED)
    if failed is None or failed.status != "True" or failed.reason != REASON_INVALID_SPEC:
        return
    metadata = job["metadata"]
    raise UserError(
        f"{format_job_name(job)}: the spec is invalid: {failed.message}; "
        f"fix it with: kubectl edit rljob {metadata['name']} -n {metadata['namespace']}"
    )


def _refuse_finished(job: Manifest, done: str) -> None:
    _refuse_invalid(job)
    phase = _phase(job)
    if phase not in ("Succeeded", "Failed"):
        return
    remedy = f"to retry: {kubectl_command('retry', job)}" if phase == "Failed" else "apply a job with another name"
    raise UserError(f"{format_job_name(job)}: has {phase.lower()} and cannot be {done}; {remedy}")
