"""suspend, resume, retry and restart: their patches and messages. Pure.

Invariant: a job that is finished, or that another controller manages, is never patched.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from rljob_api.errors import UserError
from rljob_api.manifest.agent import HOSTED
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.manifest.services.user import USER_SERVICE
from rljob_api.wire.contract import ANNOTATION_RESTART, ANNOTATION_RETRY
from rljob_cli.cluster.formatting import edit_command, format_job_name, is_foreign, kubectl_command
from rljob_cli.cluster.other_versions import parse_status
from rljob_core.backend import Manifest
from rljob_core.children.common import AGENT, SERVING
from rljob_core.plan.conditions import FAILED, REASON_INVALID_SPEC, find

ROLLOUTS_IN_TRAINER = "its rollouts run in the trainer's Pods (spec.rollout.placement: trainer)"


class Change(NamedTuple):
    """The patch (None: there is nothing to change) and the message for the user."""

    patch: Manifest | None
    message: str


def plan_change(verb: str, job: Manifest, now: datetime, *, force: bool = False) -> Change:
    """Plan what suspend, resume or retry does. Raise UserError if the job does not allow it, or would lose progress and
    `force` is not set."""
    name = format_job_name(job)
    phase = _check_changeable(job)
    if verb == "retry":
        if phase != "Failed":
            raise UserError(f"{name}: only a failed job can be retried; this one is {phase or 'not started yet'}")
        patch = {"metadata": {"annotations": {ANNOTATION_RETRY: now.isoformat()}}}
        return Change(patch, f"{name} will be retried from {_describe_start(job)}")
    if phase in ("Succeeded", "Failed"):
        done = "suspended" if verb == "suspend" else "resumed"
        remedy = (
            f"to retry: {kubectl_command('resume --retry', job)}"
            if phase == "Failed"
            else "apply a job with another name"
        )
        raise UserError(f"{name}: has {phase.lower()} and cannot be {done}; {remedy}")
    suspend, resume = verb == "suspend", kubectl_command("resume", job)
    if suspend is bool(job["spec"].get("suspend")):
        already = f"is already suspended; to resume: {resume}" if suspend else "is not suspended: nothing to do"
        return Change(None, f"{name} {already}")
    message = f"{name} is being resumed: its Pods are created again, and it starts from {_describe_start(job)}"
    if suspend:
        _check_progress_is_kept(job, "a suspension", force=force, other="")
        files = "stay" if _keeps_files(job) else "with them"
        message = f"{name} is being suspended: its Pods are deleted, its checkpoints {files}; to resume: {resume}"
    return Change({"spec": {"suspend": suspend}}, message)


def plan_restart(job: Manifest, roles: Sequence[str], now: datetime, *, force: bool = False) -> Change:
    """Plan a restart of the roles, or of all roles if none is named. Raise UserError if the job does not allow it, or
    would lose progress and `force` is not set."""
    name, phase = format_job_name(job), _check_changeable(job)
    if phase in ("Succeeded", "Failed", "Suspended"):
        remedy = {
            "Failed": f"to retry: {kubectl_command('resume --retry', job)}",
            "Succeeded": "apply a job with another name",
        }
        resume = f"to start its Pods: {kubectl_command('resume', job)}"
        raise UserError(f"{name}: is {phase.lower()} and has no Pods to restart; {remedy.get(phase, resume)}")
    known = _find_roles(job)
    services = {kind: [role for role in known if role.startswith(f"{kind}-")] for kind in SERVING}
    roles = [each for role in roles for each in (services.get(role) or [role])]
    if "rollout" in roles and shares_trainer(job):
        raise UserError(f"{name}: {ROLLOUTS_IN_TRAINER}; restart these: --role trainer")
    if unknown := [role for role in roles if role not in known]:
        raise UserError(f"{name}: has no role {', '.join(unknown)} with Pods; its roles are {', '.join(known)}")
    stops_training = not roles or not {"head", "trainer"}.isdisjoint(roles)
    if stops_training:
        _check_progress_is_kept(
            job, "a restart of head or trainers", force=force, other=", or name other roles with --role"
        )
    keys = [f"{ANNOTATION_RESTART}-{role}" for role in roles] or [ANNOTATION_RESTART]
    what = ", ".join(roles) or "all roles"
    after = ""
    if stops_training:
        after = "; training resumes from its last checkpoint"
        if not _keeps_files(job):
            after = "; training starts again at step 0"
    patch = {"metadata": {"annotations": dict.fromkeys(keys, now.isoformat())}}
    return Change(patch, f"{name}: {what} will be restarted, as the current operator builds the Pods{after}")


def _keeps_files(job: Manifest) -> bool:
    checkpoint = job["spec"].get("checkpoint") or {}
    return bool(checkpoint.get("persistentVolumeClaim") or checkpoint.get("storage"))


def _describe_start(job: Manifest) -> str:
    return "its last checkpoint" if _keeps_files(job) else "step 0: no claim and no storage has its checkpoints"


def _check_progress_is_kept(job: Manifest, what: str, *, force: bool, other: str) -> None:
    step = parse_status(job).progress.step
    if step and not force and not _keeps_files(job):
        raise UserError(
            f"{format_job_name(job)}: has no spec.checkpoint.persistentVolumeClaim or storage: {what} loses its "
            f"{step} steps; pass --force to start again at step 0{other}"
        )


def _find_roles(job: Manifest) -> list[str]:
    """The roles whose Pods belong to the job, by their names in the status."""
    rewards = job["spec"].get("rewards") or []
    served = [each["name"] for each in rewards if not (each.get("http") or each.get("rewardModelRef"))]
    rollout = [] if shares_trainer(job) else ["rollout"]
    trainer = ["trainer"] if trains(job) else []
    return ["head", *trainer, *rollout, *(f"reward-{name}" for name in served), *find_agent_roles(job)]


def trains(job: Manifest) -> bool:
    return bool(job["spec"].get("task", "train") == "train")


def shares_trainer(job: Manifest) -> bool:
    """Whether the rollouts run in the trainer's Pods."""
    return (job["spec"].get("rollout") or {}).get("placement") == "trainer"


def find_agent_roles(job: Manifest) -> list[str]:
    """`agent-user`, `agent-NAME` per tool, and `agent-runner`."""
    agent = job["spec"].get("agent") or {}
    names = [*([USER_SERVICE] if agent.get("user") else []), *(tool["name"] for tool in agent.get("tools") or [])]
    names += [RUNNER_SERVICE] if agent.get("type") in HOSTED else []
    return [f"{AGENT}-{name}" for name in names]


def _check_changeable(job: Manifest) -> str:
    """Return the phase of a job that the commands may change."""
    name = format_job_name(job)
    if is_foreign(job):
        manager = job["spec"]["managedBy"]
        raise UserError(f"{name}: spec.managedBy is {manager}; change the job through that controller")
    failed = find(parse_status(job), FAILED)
    # A job with an invalid spec is not finished: the operator reconciles it as soon as its spec changes.
    if failed and failed.status == "True" and failed.reason == REASON_INVALID_SPEC:
        raise UserError(f"{name}: the spec is invalid: {failed.message}; fix it with: {edit_command(job)}")
    return str((job.get("status") or {}).get("phase") or "")
