"""How the commands describe jobs and Pods: names, what a job waits for, what is wrong with a Pod, ages. Pure."""

from datetime import datetime, timedelta
from typing import Literal

from rljob_api.manifest.status import Condition, OutageStatus, RLJobStatus
from rljob_api.wire.contract import SCHEDULING_GATE
from rljob_core.backend import Manifest
from rljob_core.plan import conditions
from rljob_core.plan.lifecycle import MANAGED_BY_US
from rljob_core.plan.observed_job import container_statuses, extract_error_message, is_ready, is_terminating

_CONDITION_BY_PHASE = {
    "": conditions.RUNNING,
    "Pending": conditions.RUNNING,
    "Queued": conditions.QUEUED,
    "Suspended": conditions.SUSPENDED,
    "Running": conditions.RUNNING,
    "Restarting": conditions.RESTARTING,
    "Succeeded": conditions.SUCCEEDED,
    "Failed": conditions.FAILED,
}
"""The condition whose message explains the phase."""
_ALL_READY = "all Pods are ready"
_STARTING = ("ContainerCreating", "PodInitializing")
Health = Literal["ok", "waiting", "broken"]
"""State of a Pod. broken: it has failed, or does not start until something is changed."""


def format_job_name(manifest: Manifest) -> str:
    return f"RLJob {manifest['metadata']['namespace']}/{manifest['metadata']['name']}"


def is_foreign(manifest: Manifest) -> bool:
    """Whether another controller manages the job."""
    return manifest["spec"].get("managedBy") not in (None, MANAGED_BY_US)


def kubectl_command(verb: str, manifest: Manifest, *options: str) -> str:
    metadata = manifest["metadata"]
    return " ".join(["kubectl rljob", verb, metadata["name"], "-n", metadata["namespace"], *options])


def edit_command(manifest: Manifest) -> str:
    return f"kubectl edit rljob {manifest['metadata']['name']} -n {manifest['metadata']['namespace']}"


def phase_condition(status: RLJobStatus) -> Condition | None:
    return conditions.find(status, _CONDITION_BY_PHASE[status.phase])


def describe_wait(status: RLJobStatus) -> str:
    """What the job waits for, or why it ended; empty if nothing blocks it."""
    condition = phase_condition(status)
    message = condition.message if condition and condition.message != _ALL_READY else ""
    if status.phase == "Running":
        return "; ".join(filter(None, [status.progress.waits_for, message]))
    if status.phase == "Failed" and condition:
        return f"{condition.reason}: {message}"
    return "" if status.phase in ("Succeeded", "Suspended") else message


def describe_stalls(status: RLJobStatus, now: datetime) -> list[str]:
    """What hangs, and what is waited for with the time that is left; nothing unless the job runs."""
    if status.phase not in ("Running", "Restarting"):
        return []
    hung = [
        f"{part.role}: {part.name} hangs for {format_age(part.since, now)} (limit {part.limit_seconds} s)"
        for part in status.progress.hung
    ]
    return hung + [_describe_outage(outage, now) for outage in status.progress.outages]


def _describe_outage(outage: OutageStatus, now: datetime) -> str:
    left = format_age(now, outage.since + timedelta(seconds=outage.limit_seconds))
    return f"waits for {outage.what}, which fails for {format_age(outage.since, now)}; {left} left"


def describe_pod(pod: Manifest) -> str:
    """'Ready', 'Succeeded', or what is wrong: the reason, and the message if there is one."""
    status = pod.get("status") or {}
    if is_terminating(pod):
        return "Terminating"
    if status.get("phase") == "Succeeded":
        return "Succeeded"
    if is_ready(pod):
        return "Ready"
    if status.get("phase") == "Failed" and status.get("reason"):
        return _join(status["reason"], status.get("message"))
    return _describe_containers(pod) or _describe_scheduling(pod)


def judge_pod(pod: Manifest) -> Health:
    status = pod.get("status") or {}
    if is_terminating(pod):
        return "waiting"
    if status.get("phase") == "Succeeded" or is_ready(pod):
        return "ok"
    states = [each.get("state") or {} for each in container_statuses(pod)]
    has_ended = any((state.get("terminated") or {}).get("exitCode") for state in states)
    is_stuck = any((state.get("waiting") or {}).get("reason") not in (None, *_STARTING) for state in states)
    is_unschedulable = any(
        condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable"
        for condition in status.get("conditions") or []
    )
    return "broken" if status.get("phase") == "Failed" or has_ended or is_stuck or is_unschedulable else "waiting"


def _describe_containers(pod: Manifest) -> str:
    statuses = container_statuses(pod)
    for status in statuses:
        state = status.get("state") or {}
        ended = state.get("terminated") or {}
        if ended.get("exitCode"):
            return _describe_end(ended)
        waiting = state.get("waiting") or {}
        reason = waiting.get("reason")
        if reason and reason not in _STARTING:
            last = (status.get("lastState") or {}).get("terminated")
            # 'back-off 40s restarting failed container' is less useful than the exit code.
            return f"{reason}: {_describe_end(last)}" if last else _join(reason, waiting.get("message"))
    if any((status.get("state") or {}).get("running") for status in statuses):
        return "not ready: running, but the readiness probe has not succeeded yet"
    return "its containers are being created" if statuses else ""


def _describe_end(ended: Manifest) -> str:
    reason = ended.get("reason")
    suffix = f" ({reason})" if reason and reason not in ("Error", "Completed") else ""
    return _join(f"ended with exit code {ended.get('exitCode')}{suffix}", extract_error_message(ended.get("message")))


def _describe_scheduling(pod: Manifest) -> str:
    gates = [gate["name"] for gate in pod["spec"].get("schedulingGates") or []]
    if gates:
        reason = "until all Pods of the job exist" if SCHEDULING_GATE in gates else "by another controller"
        return f"held back {reason} (scheduling gate {', '.join(gates)})"
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return _join(condition.get("reason") or "Unschedulable", condition.get("message"))
    return "starting" if pod["spec"].get("nodeName") else "waiting to be scheduled"


def _join(reason: str, message: str | None) -> str:
    return f"{reason}: {message}" if message else reason


def format_age(then: datetime | None, now: datetime) -> str:
    """As kubectl does: 45s, 12m, 3h, 8d."""
    if then is None:
        return "-"
    seconds = max(0, int((now - then).total_seconds()))
    unit, size = next((u, s) for u, s in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)) if seconds >= 2 * s or s == 1)
    return f"{seconds // size}{unit}"
