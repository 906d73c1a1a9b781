"""`rljob explain`: why a job is in its state and what to do about it, from one observation. Pure.

Causes and remedies come from the operator's own rules, so they hold even if the operator does not run.
"""

from collections.abc import Iterator
from datetime import datetime

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.driver_status import SERVING
from rljob_cli.cluster.explanation import Explanation, InvalidSamples, PodProblem, RoleReport, WarningEvent
from rljob_cli.cluster.formatting import (
    describe_pod,
    describe_stalls,
    describe_wait,
    edit_command,
    format_age,
    format_job_name,
    is_foreign,
    kubectl_command,
    phase_condition,
)
from rljob_cli.cluster.observation import JobObservation, event_time, involved_object
from rljob_cli.cluster.other_versions import find_unknown_fields
from rljob_cli.manifests import role_of
from rljob_cli.run.snapshot import FINAL_PHASES
from rljob_core.backend import Manifest
from rljob_core.children.network import OPERATOR_LABELS
from rljob_core.plan import conditions
from rljob_core.plan.avoided_nodes import describe_avoided
from rljob_core.plan.causes import Cause, find_causes
from rljob_core.plan.lost_nodes import NODE_LOST, OUT_OF_SERVICE_TAINT, LostPods, find_lost_pods
from rljob_core.plan.observed_job import count_restarts, last_termination, name_of, observe_job

_MAX_WARNINGS = 8
_MAX_COMMANDS = 4
_HEALTHY = ("Ready", "Succeeded")
_OPERATOR_SELECTOR = ",".join(f"{key}={value}" for key, value in OPERATOR_LABELS.items())
_OPERATOR_PODS = f"kubectl get pods -A -l {_OPERATOR_SELECTOR}"
_FAILURE_REMEDIES = {
    "UserError": "fix what the message names, then retry (changing the spec restarts the job automatically)",
    "HeadFailed": "read the head's log, then retry",
    "BackoffLimitExceeded": ("read the role's log, and fix what fails; then retry"),
    "DeadlineExceeded": "raise spec.activeDeadlineSeconds, then retry",
    conditions.REASON_INVALID_SPEC: "change the spec; the job then needs no retry",
}
"""By the reason of the condition Failed."""


def explain(observation: JobObservation) -> Explanation:
    status, job = observation.status, observation.parse()
    lost, causes = _find_causes(observation, job, status)
    why = _explain_phase(observation, status)
    for cause in causes:  # reported under remedies
        why = why.replace(f"; {cause.message}", "")
    condition = phase_condition(status)
    avoided = [] if status.phase in FINAL_PHASES else status.avoided_nodes
    unknown = [] if job else ["the job's spec: it does not match this version of rljob"]
    fields = find_unknown_fields(observation.manifest)
    if job and fields:
        unknown = [f"{', '.join(fields)}: fields that this version of rljob does not know; it ignores them"]
    return Explanation(
        job=format_job_name(observation.manifest),
        # As it is written: a phase of a newer operator is not a type of this version.
        phase=(observation.manifest.get("status") or {}).get("phase") or "not reconciled yet",
        since=condition.last_transition_time.isoformat() if condition and status.phase else "",
        why=why,
        progress=_describe_progress(status, observation.observed_at),
        stalls=describe_stalls(status, observation.observed_at),
        conditions=_other_conditions(status),
        roles=list(_report_roles(observation, status, None if fields else job)),
        invalid_samples=[
            InvalidSamples(p.reward, p.reason, p.message, p.step)
            for p in status.progress.problems
            if not p.is_checkpoint
        ],
        damaged_checkpoints=[p.message for p in status.progress.problems if p.is_checkpoint],
        remedies=[
            *_failure_remedies(observation, status),
            *(cause.message for cause in causes),
            *(describe_avoided(each, is_kueue=job.spec.scheduling.gang == "kueue") for each in avoided if job),
        ],
        warnings=_newest_warnings(observation),
        next=_next_commands(observation, status, causes, lost),
        unreadable=[*observation.unreadable, *unknown],
    )


def _find_causes(
    observation: JobObservation, job: RLJob | None, status: RLJobStatus
) -> tuple[list[LostPods], list[Cause]]:
    """Return the Pods of lost nodes, and the causes of what is wrong, those first."""
    if job is None or status.phase in (*FINAL_PHASES, "Suspended"):
        return [], []
    observed = observation.as_observed()
    seen = observe_job(job, observed)
    lost = [each for each in find_lost_pods(seen) if each.since <= observation.observed_at]
    # A RewardModel that could not be read, or has another version's fields, may exist.
    models = observation.reward_models
    is_certain = models is not None and len(models) == len(observed.reward_models)
    others = [cause for cause in find_causes(seen) if is_certain or cause.reason != "RewardModelMissing"]
    return lost, [*(each.cause for each in lost), *others]


def _is_unobserved(manifest: Manifest, status: RLJobStatus) -> bool:
    return status.observed_generation < manifest["metadata"]["generation"]


def _explain_phase(observation: JobObservation, status: RLJobStatus) -> str:
    manifest = observation.manifest
    if is_foreign(manifest):
        manager = manifest["spec"]["managedBy"]
        return f"spec.managedBy is {manager}: that controller acts on the job, not RLJob's operator"
    if _is_unobserved(manifest, status):
        generation = manifest["metadata"]["generation"]
        waiting = f"the operator has not observed generation {generation} of this job: it is lagging, or not running"
        return "; ".join(filter(None, [waiting, describe_wait(status)]))
    if status.phase == "Suspended":
        suspended = conditions.find(status, conditions.SUSPENDED)
        return suspended.message if suspended else "spec.suspend is true: its Pods are deleted"
    return describe_wait(status)


def _other_conditions(status: RLJobStatus) -> list[tuple[str, str]]:
    """Relevant conditions, without the one that decides the phase."""
    notable = {
        (conditions.NAME_CONFLICT, "True"),
        (conditions.RECONCILE_FAILED, "True"),
        (conditions.RESTARTING, "True"),
        (conditions.POOLS_ISOLATED, "False"),
        (conditions.LEARNING, "False"),
        (conditions.PROGRESS_LOST, "True"),
        (conditions.PROGRESSING, "False"),
        (conditions.PROGRESSING, "Unknown"),
    }
    if status.phase == "Failed":  # it still runs
        notable.add((conditions.RUNNING, "True"))
    relevant = []
    for condition in status.conditions:
        if (condition.type, condition.status) in notable and condition is not phase_condition(status):
            state = "" if condition.status == "True" else f" is {condition.status.lower()}"
            relevant.append((f"{condition.type}{state} ({condition.reason})", condition.message))
    return relevant


def _describe_progress(status: RLJobStatus, now: datetime) -> str:
    progress = status.progress
    if progress.phase == SERVING and status.phase == "Running":
        return f"serves {progress.waits_for}"
    if not progress.total_steps:
        return ""
    parts = [f"step {progress.step}/{progress.total_steps}"]
    if progress.last_step_time is not None and status.phase in ("Running", "Restarting"):
        parts.append(f"the last one {format_age(progress.last_step_time, now)} ago")
    if progress.reward is not None:
        parts.append(f"reward {progress.reward:.3f}")
    if progress.weight_version:
        parts.append(f"weights v{progress.weight_version}")
    if progress.phase:
        parts.append(f"the driver's phase is {progress.phase}")
    if progress.training_share is not None:
        parts.append(f"trained in {progress.training_share:.0%} of its time")
    return ", ".join(parts)


def _report_roles(observation: JobObservation, status: RLJobStatus, job: RLJob | None) -> Iterator[RoleReport]:
    """Ready as the Pods are; desired as the spec says, or the status if the job has ended or its spec is unreadable."""
    restarts = {role.name: role.restarts for role in status.roles}
    images = {role.name: role.image for role in status.roles}
    desired: dict[str, int] = {}
    if job and status.phase not in (*FINAL_PHASES, "Suspended"):
        desired = {role.name: role.desired for role in observe_job(job, observation.as_observed()).roles}
    for name, wanted in (desired or {role.name: role.desired for role in status.roles}).items():
        pods = sorted((pod for pod in observation.pods if role_of(pod) == name), key=name_of)
        problems = [PodProblem(name_of(p), why, count_restarts(p)) for p in pods if (why := _describe_problem(p))]
        if desired and wanted > len(pods):
            problems.append(PodProblem("", f"{wanted - len(pods)} not created yet", 0))
        ready = min(wanted, sum(describe_pod(pod) == "Ready" for pod in pods))
        yield RoleReport(name, ready, wanted, restarts.get(name, 0), problems, images.get(name, ""))


def _describe_problem(pod: Manifest) -> str:
    """What is wrong with a Pod now, or how its previous container failed; empty if it is healthy."""
    state = describe_pod(pod)
    if state not in _HEALTHY:
        return state
    ended = last_termination(pod)
    if ended and state == "Ready":
        return f"ready again; the previous container exited with code {ended['exitCode']}"
    return ""


def _failure_remedies(observation: JobObservation, status: RLJobStatus) -> list[str]:
    failed = conditions.find(status, conditions.FAILED)
    remedy = _FAILURE_REMEDIES.get(failed.reason) if failed else None
    if status.phase != "Failed" or failed is None or remedy is None:
        return []
    if failed.reason == conditions.REASON_INVALID_SPEC:
        return [remedy]
    checkpoint = observation.manifest["spec"].get("checkpoint") or {}
    if checkpoint.get("persistentVolumeClaim") or checkpoint.get("storage"):
        return [f"{remedy}: it resumes from its last checkpoint"]
    return [f"{remedy}; without spec.checkpoint.persistentVolumeClaim or storage it restarts at step 0"]


def _newest_warnings(observation: JobObservation) -> list[WarningEvent]:
    """Newest first, equal ones once."""
    found: dict[tuple[str, str, str], WarningEvent] = {}
    for event in observation.warnings:
        key = (" ".join(involved_object(event)), str(event.get("reason")), str(event.get("message")))
        count = int((event.get("series") or {}).get("count") or event.get("count") or 1)
        found.setdefault(key, WarningEvent(event_time(event), *key, count))
    return list(found.values())[:_MAX_WARNINGS]


def _next_commands(
    observation: JobObservation, status: RLJobStatus, causes: list[Cause], lost: list[LostPods]
) -> list[str]:
    job = observation.manifest
    if is_foreign(job):
        return []
    if _is_unobserved(job, status):
        return [_OPERATOR_PODS]
    if status.phase == "Failed":
        return _commands_after_failure(observation, status)
    if status.phase == "Succeeded":
        return [kubectl_command("logs", job, "--role head", "--tail 20")] if observation.pods else []
    if status.phase == "Suspended":
        return [kubectl_command("resume", job)]
    conflict = conditions.find(status, conditions.NAME_CONFLICT)
    if conflict and conflict.status == "True":
        kind, _, name = conflict.message.split(":")[0].split(",")[0].partition(" ")
        return [f"kubectl describe {kind.lower()} {name} -n {job['metadata']['namespace']}"]
    commands = [f"kubectl describe node {each.node}" for each in lost]
    commands += [f"kubectl taint nodes {e.node} {OUT_OF_SERVICE_TAINT}" for e in lost if e.problem == NODE_LOST]
    by_reason = _list_commands(observation)
    commands += [by_reason.get(cause.reason, "") for cause in causes]
    commands += [kubectl_command("logs", job, "--role", part.role) for part in status.progress.hung]
    for pod in observation.pods:
        if last_termination(pod) and describe_pod(pod) != "Ready":
            previous = ["--previous"] if count_restarts(pod) else []
            commands.append(kubectl_command("logs", job, "--role", role_of(pod), *previous))
    unique = list(dict.fromkeys(filter(None, commands)))[:_MAX_COMMANDS]
    return unique or [kubectl_command("top", job, "--watch")]


def _commands_after_failure(observation: JobObservation, status: RLJobStatus) -> list[str]:
    job = observation.manifest
    failed = conditions.find(status, conditions.FAILED)
    reason = failed.reason if failed else ""
    if reason == conditions.REASON_INVALID_SPEC:
        return [edit_command(job)]
    role = next((role_of(pod) for pod in observation.pods if last_termination(pod)), "")
    logs = [kubectl_command("logs", job, "--role", role)] if role else []
    edit = [edit_command(job)] if reason in ("UserError", "DeadlineExceeded") else []
    return [*logs, *edit, kubectl_command("resume --retry", job)]


def _list_commands(observation: JobObservation) -> dict[str, str]:
    """Return the command that shows more of a cause, by its reason."""
    namespace, edit = observation.manifest["metadata"]["namespace"], edit_command(observation.manifest)
    return {
        "Unschedulable": "kubectl get nodes --show-labels",
        "VolumeUnbound": f"kubectl describe pvc -n {namespace}",
        "VolumeHeld": f"kubectl describe pvc -n {namespace}",
        "QuotaExceeded": f"kubectl describe resourcequota -n {namespace}",
        "QuotaUnspecified": edit,
        "RewardModelNotReady": f"kubectl describe rewardmodels -n {namespace}",
        "RewardModelMissing": f"kubectl get rewardmodels -n {namespace}",
        "ImagePull": edit,
        "OOMKilled": edit,
        "DiskLimitExceeded": edit,
        "CreateContainerConfigError": f"kubectl get configmaps,secrets -n {namespace}",
        "ReferenceMissing": f"kubectl get configmaps,secrets,pvc -n {namespace}",
        "LimitRange": f"kubectl describe limitrange -n {namespace}",
        "FailedMount": f"kubectl get configmaps,secrets,pvc -n {namespace}",
        "SuspendedByKueue": "kubectl get configmap -n kueue-system kueue-manager-config -o yaml",
        "HeadSuspended": f"kubectl get jobs -n {namespace} --show-managed-fields -o yaml",
        "HeldByKueue": f"kubectl get workloads.kueue.x-k8s.io -n {namespace}",
        "FailedCreate": f"kubectl get events -n {namespace} --field-selector reason=FailedCreate",
    }
