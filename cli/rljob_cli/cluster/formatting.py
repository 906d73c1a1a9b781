"""How the commands say things: what a job waits for, what is wrong with a Pod, ages, tables. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from rich.cells import cell_len, set_cell_size

from rljob_api.manifest.status import Condition, RLJobStatus
from rljob_api.wire.contract import LABEL_REWARD, LABEL_ROLE, SCHEDULING_GATE
from rljob_cli.cluster.client import Manifest
from rljob_operator.plan import conditions
from rljob_operator.plan.observed_job import container_statuses, count_restarts, is_ready, is_terminating, what_it_said

_DECIDING = {
    "": conditions.RUNNING,
    "Pending": conditions.RUNNING,
    "Queued": conditions.QUEUED,
    "Suspended": conditions.SUSPENDED,
    "Running": conditions.RUNNING,
    "Restarting": conditions.RESTARTING,
    "Succeeded": conditions.SUCCEEDED,
    "Failed": conditions.FAILED,
}
"""The condition whose message says why the job is in its phase."""
_ALL_READY = "all Pods are ready"
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
"""What a program printed before it died may hold: line breaks, tabs, a terminal's escapes."""


def name_job(manifest: Manifest) -> str:
    return f"RLJob {manifest['metadata']['namespace']}/{manifest['metadata']['name']}"


def command(verb: str, manifest: Manifest, *options: str) -> str:
    """The command to type: kubectl rljob VERB NAME -n NAMESPACE."""
    metadata = manifest["metadata"]
    return " ".join(["kubectl rljob", verb, metadata["name"], "-n", metadata["namespace"], *options])


def deciding_condition(status: RLJobStatus) -> Condition | None:
    return conditions.find(status, _DECIDING[status.phase])


def describe_wait(status: RLJobStatus) -> str:
    """What the job waits for, or why it ended; empty when nothing stands in its way."""
    said = deciding_condition(status)
    message = said.message if said and said.message != _ALL_READY else ""
    if status.phase == "Running":
        return "; ".join(filter(None, [status.progress.waits_for, message]))
    if status.phase == "Failed" and said:
        return f"{said.reason}: {message}"
    return "" if status.phase in ("Succeeded", "Suspended") else message


def role_of(pod: Manifest) -> str:
    labels = pod["metadata"].get("labels") or {}
    reward = labels.get(LABEL_REWARD)
    return f"{labels.get(LABEL_ROLE, '')}-{reward}" if reward else str(labels.get(LABEL_ROLE, ""))


def describe_pod(pod: Manifest) -> str:
    """'Ready', 'Succeeded', or what is wrong: reason, and message where there is one."""
    status = pod.get("status") or {}
    if is_terminating(pod):
        return "Terminating"
    if status.get("phase") == "Succeeded":
        return "Succeeded"
    if is_ready(pod):
        return "Ready"
    if status.get("phase") == "Failed" and status.get("reason"):
        return _join(status["reason"], status.get("message"))
    return _describe_containers(pod) or _describe_place(pod)


def _describe_containers(pod: Manifest) -> str:
    statuses = container_statuses(pod)
    for status in statuses:
        state = status.get("state") or {}
        ended = state.get("terminated") or {}
        if ended.get("exitCode"):
            return _describe_end(ended)
        waiting = state.get("waiting") or {}
        reason = waiting.get("reason")
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            last = (status.get("lastState") or {}).get("terminated")
            # 'back-off 40s restarting failed container' says less than how it ended.
            return f"{reason}: {_describe_end(last)}" if last else _join(reason, waiting.get("message"))
    if any((status.get("state") or {}).get("running") for status in statuses):
        return "not ready: it runs, its readiness probe does not answer yet"
    return "its containers are being created" if statuses else ""


def _describe_end(ended: Manifest) -> str:
    said = what_it_said(ended.get("message"))
    reason = ended.get("reason")
    why = f" ({reason})" if reason and reason not in ("Error", "Completed") else ""
    return _join(f"ended with exit code {ended.get('exitCode')}{why}", said)


def _describe_place(pod: Manifest) -> str:
    gates = [gate["name"] for gate in pod["spec"].get("schedulingGates") or []]
    if gates:
        who = "until all Pods of the job exist" if SCHEDULING_GATE in gates else "by another controller"
        return f"held back {who} (scheduling gate {', '.join(gates)})"
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return _join(condition.get("reason") or "Unschedulable", condition.get("message"))
    return "has a node and starts" if pod["spec"].get("nodeName") else "waits for its node"


def restarts_of(pod: Manifest) -> int:
    return count_restarts(pod)


def _join(reason: str, message: str | None) -> str:
    return f"{reason}: {message}" if message else reason


def format_age(then: datetime | None, now: datetime) -> str:
    """As kubectl does: 45s, 12m, 3h, 8d."""
    if then is None:
        return "-"
    seconds = max(0, int((now - then).total_seconds()))
    for unit, size, until in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172800)):
        if seconds < until:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86400}d"


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, gap: int = 3
) -> list[str]:
    """Lines of columns as wide as their widest cell; the last column takes what is left of `width`, if given."""
    cells = [[_CONTROLS.sub(" ", str(cell)) for cell in row] for row in [header, *rows]]
    widths = [max(cell_len(row[i]) for row in cells) for i in range(len(header))]
    lines = [(" " * gap).join(map(set_cell_size, row, widths)).rstrip() for row in cells]
    if width is None:
        return lines
    return [line if cell_len(line) <= width else f"{set_cell_size(line, width - 1)}…" for line in lines]
