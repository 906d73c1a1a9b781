"""suspend, resume and retry: their patches and messages. Pure.

Invariant: a job that is finished, or that another controller manages, is never patched.
"""

from datetime import datetime
from typing import NamedTuple

from rljob_api.errors import UserError
from rljob_api.wire.contract import ANNOTATION_RETRY
from rljob_cli.cluster.formatting import edit_command, format_job_name, is_foreign, kubectl_command
from rljob_cli.cluster.observation import parse_status
from rljob_operator.backend import Manifest
from rljob_operator.plan.conditions import FAILED, REASON_INVALID_SPEC, find


class Change(NamedTuple):
    """The patch (None: there is nothing to change) and the message for the user."""

    patch: Manifest | None
    message: str


def plan_change(verb: str, job: Manifest, now: datetime) -> Change:
    """Plan what suspend, resume or retry does. Raise UserError if the job does not allow it."""
    name = format_job_name(job)
    if is_foreign(job):
        manager = job["spec"]["managedBy"]
        raise UserError(f"{name}: spec.managedBy is {manager}; change the job through that controller")
    failed = find(parse_status(job), FAILED)
    # A job with an invalid spec is not finished: the operator reconciles it as soon as its spec changes.
    if failed and failed.status == "True" and failed.reason == REASON_INVALID_SPEC:
        raise UserError(f"{name}: the spec is invalid: {failed.message}; fix it with: {edit_command(job)}")
    phase = str((job.get("status") or {}).get("phase") or "")
    if verb == "retry":
        if phase != "Failed":
            raise UserError(f"{name}: only a failed job can be retried; this one is {phase or 'not started yet'}")
        patch = {"metadata": {"annotations": {ANNOTATION_RETRY: now.isoformat()}}}
        return Change(patch, f"{name} will be retried from its last checkpoint")
    if phase in ("Succeeded", "Failed"):
        done = "suspended" if verb == "suspend" else "resumed"
        remedy = f"to retry: {kubectl_command('retry', job)}" if phase == "Failed" else "apply a job with another name"
        raise UserError(f"{name}: has {phase.lower()} and cannot be {done}; {remedy}")
    suspend, resume = verb == "suspend", kubectl_command("resume", job)
    if suspend is bool(job["spec"].get("suspend")):
        already = f"is already suspended; to resume: {resume}" if suspend else "is not suspended: nothing to do"
        return Change(None, f"{name} {already}")
    message = f"{name} is being resumed: its Pods are created again, and it resumes from its last checkpoint"
    if suspend:
        message = f"{name} is being suspended: its Pods are deleted, its checkpoints stay; to resume: {resume}"
    return Change({"spec": {"suspend": suspend}}, message)
