"""suspend, resume and retry: their patches and messages. Pure.

Invariant: a job that is finished, or that another controller manages, is never patched.
"""

from datetime import datetime
from typing import Any, NamedTuple

from rljob_api.errors import UserError
from rljob_api.wire.contract import ANNOTATION_RETRY
from rljob_cli.cluster.formatting import format_job_name, is_foreign, kubectl_command
from rljob_cli.cluster.observation import parse_status
from rljob_operator.backend import Manifest
from rljob_operator.plan.conditions import FAILED, REASON_INVALID_SPEC, find


class Change(NamedTuple):
    """The patch (None: there is nothing to change) and the message for the user."""

    patch: Manifest | None
    message: str


def plan_change(verb: str, job: Manifest, now: datetime) -> Change:
    """Plan what suspend, resume or retry does. Raise UserError if the job does not allow it."""
    name, metadata = format_job_name(job), job["metadata"]
    if is_foreign(job):
        manager = job["spec"]["managedBy"]
        raise UserError(f"{name}: spec.managedBy is {manager}; change the job through that controller")
    failed = find(parse_status(job), FAILED)
    # A job with an invalid spec is not finished: the operator reconciles it as soon as its spec changes.
    if failed and failed.status == "True" and failed.reason == REASON_INVALID_SPEC:
        fix = f"kubectl edit rljob {metadata['name']} -n {metadata['namespace']}"
        raise UserError(f"{name}: the spec is invalid: {failed.message}; fix it with: {fix}")
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
    return _plan_suspend(job) if verb == "suspend" else _plan_resume(job)


def _plan_suspend(job: Manifest) -> Change:
    name, resume = format_job_name(job), kubectl_command("resume", job)
    if job["spec"].get("suspend"):
        return Change(None, f"{name} is already suspended; to resume: {resume}")
    message = f"{name} is being suspended: its Pods are deleted, its checkpoints stay; to resume: {resume}"
    return Change({"spec": {"suspend": True}}, message)


def _plan_resume(job: Manifest) -> Change:
    name = format_job_name(job)
    if not job["spec"].get("suspend"):
        return Change(None, f"{name} is not suspended: nothing to do")
    message = f"{name} is being resumed: its Pods are created again, and it resumes from its last checkpoint"
    return Change({"spec": {"suspend": False}}, message)


def describe_change(verb: str, job: Manifest, change: Change) -> dict[str, Any]:
    return {
        "command": verb,
        "namespace": job["metadata"]["namespace"],
        "name": job["metadata"]["name"],
        "changed": change.patch is not None,
        "message": change.message,
    }
