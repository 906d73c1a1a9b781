"""`rljob top`: jobs as rows, or one job with its roles, rewards and Pods. Field names are part of --output json."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kubernetes.utils.quantity import parse_quantity
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rljob_api.errors import RLJobError
from rljob_api.wire.contract import LABEL_JOB
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.formatting import describe_pod, describe_stalls, describe_wait, format_age
from rljob_cli.cluster.observation import parse_status, parse_time
from rljob_cli.manifests import role_of
from rljob_cli.run.reward_rows import HEADER, RewardRow, row_cells
from rljob_cli.tables import build_table, to_text
from rljob_core.backend import Manifest
from rljob_core.plan.observed_job import count_restarts, name_of


@dataclass(frozen=True)
class JobRow:
    """One job. None: the status does not say."""

    namespace: str
    name: str
    phase: str
    step: int
    total_steps: int
    last_step_age: str
    """Since the last step; `-` before the first one."""
    reward: float | None
    rollouts: str
    rewards: str
    driver_phase: str
    """Empty unless the job runs."""
    schedule: dict[str, Any] | None
    """The status's progress.schedule: type, staleness, groups, busy. None unless the job runs and reports it."""
    age: str
    waits_for: str


@dataclass(frozen=True)
class PodRow:
    name: str
    role: str
    node: str
    state: str
    restarts: int
    cpu_cores: float | None
    """In use, by metrics.k8s.io; None: unknown."""
    memory_bytes: int | None
    age: str


@dataclass(frozen=True)
class JobView:
    job: JobRow
    roles: list[dict[str, Any]]
    rewards: list[RewardRow]
    pods: list[PodRow]


def view_row(manifest: Manifest, now: datetime) -> JobRow:
    metadata, status = manifest["metadata"], parse_status(manifest)
    progress, is_running = status.progress, status.phase in ("Running", "Restarting")
    return JobRow(
        namespace=metadata["namespace"],
        name=metadata["name"],
        phase=status.phase or "Pending",
        step=progress.step,
        total_steps=progress.total_steps,
        last_step_age=format_age(progress.last_step_time if is_running else None, now),
        reward=progress.reward,
        rollouts=status.rollouts,
        rewards=status.rewards,
        driver_phase=progress.phase if is_running else "",
        schedule=progress.schedule.model_dump() if progress.schedule and is_running else None,
        age=format_age(parse_time(metadata.get("creationTimestamp")), now),
        waits_for="; ".join(filter(None, [*describe_stalls(status, now), describe_wait(status)]))
        if status.conditions
        else "not reconciled yet; is the operator running?",
    )


def view_jobs(manifests: list[Manifest], now: datetime) -> list[JobRow]:
    rows = [view_row(manifest, now) for manifest in manifests]
    return sorted(rows, key=lambda row: (row.namespace, row.name))


async def fetch_pods(cluster: Cluster, name: str) -> tuple[list[Manifest], list[Manifest]]:
    """Return a job's Pods and their metrics; no metrics if the cluster does not serve metrics.k8s.io."""
    selector = f"{LABEL_JOB}={name}"
    try:
        metrics = await cluster.list_pod_metrics(selector)
    except ClusterError:
        metrics = []
    return await cluster.list_pods(selector), metrics


def view_job(
    manifest: Manifest, pods: list[Manifest], metrics: list[Manifest], now: datetime, rewards: Sequence[RewardRow] = ()
) -> JobView:
    usage = {metric["metadata"]["name"]: metric.get("containers") or [] for metric in metrics}
    roles = [role.model_dump() for role in parse_status(manifest).roles]
    order = {role["name"]: index for index, role in enumerate(roles)}
    rows = [_view_pod(pod, usage.get(name_of(pod), []), now) for pod in pods]
    rows.sort(key=lambda row: (order.get(row.role, len(order)), row.name))
    return JobView(view_row(manifest, now), roles, list(rewards), rows)


def _view_pod(pod: Manifest, containers: list[Manifest], now: datetime) -> PodRow:
    def total(resource: str) -> float | None:
        used = [parse_quantity(container["usage"].get(resource, "0")) for container in containers]
        return float(sum(amount or 0 for amount in used)) if used else None

    memory = total("memory")
    return PodRow(
        name=name_of(pod),
        role=role_of(pod),
        node=pod["spec"].get("nodeName") or "",
        state=describe_pod(pod),
        restarts=count_restarts(pod),
        cpu_cores=total("cpu"),
        memory_bytes=None if memory is None else int(memory),
        age=format_age(parse_time(pod["metadata"].get("creationTimestamp")), now),
    )


def draw_jobs(rows: list[JobRow], namespace: str, everywhere: bool) -> RenderableType:
    if not rows:
        return Text(f"no RLJobs in {'any namespace' if everywhere else f'namespace {namespace} (-A: all namespaces)'}")
    header = [
        "NAME",
        "PHASE",
        "STEP",
        "LAST STEP",
        "REWARD",
        "ROLLOUTS",
        "REWARDS",
        "DRIVER",
        "STALENESS",
        "AGE",
        "WAITS FOR",
    ]
    cells = [_cells(row) for row in rows]
    if everywhere:
        header = ["NAMESPACE", *header]
        cells = [[row.namespace, *line] for row, line in zip(rows, cells, strict=True)]
    return build_table(header, cells)


def _cells(row: JobRow) -> list[str]:
    step = f"{row.step}/{row.total_steps}" if row.total_steps else "-"
    reward = "-" if row.reward is None else f"{row.reward:.3f}"
    counts = (row.rollouts or "-", row.rewards or "-", row.driver_phase or "-", _number(row.schedule, "staleness"))
    return [row.name, row.phase, step, row.last_step_age, reward, *counts, row.age, row.waits_for]


def _number(schedule: dict[str, Any] | None, name: str) -> str:
    value = schedule[name] if schedule else None
    return "-" if value is None else str(value)


def _draw_schedule(schedule: dict[str, Any]) -> RenderableType:
    groups = [_number(schedule, name) for name in ("groups_in_flight", "groups_scored", "groups_due")]
    header = ["SCHEDULE", "STALENESS", "IN FLIGHT", "SCORED", "DUE", "BUSY IN THE LAST STEP"]
    cells = [schedule["type"] or "-", _number(schedule, "staleness"), *groups, schedule["busy"] or "-"]
    return build_table(header, [cells])


def draw_job(view: JobView) -> RenderableType:
    tables: list[RenderableType] = [draw_jobs([view.job], view.job.namespace, False)]
    if view.job.schedule:
        tables += ["", _draw_schedule(view.job.schedule)]
    if view.roles:
        roles = [[r["name"], f"{r['ready']}/{r['desired']}", str(r["restarts"])] for r in view.roles]
        tables += ["", build_table(["ROLE", "READY", "RESTARTS"], roles)]
    if view.rewards:
        tables += ["", build_table(HEADER, [row_cells(row) for row in view.rewards], gap=2)]
    if view.pods:
        is_measured = any(pod.cpu_cores is not None for pod in view.pods)
        measured = ["CPU", "MEMORY"] if is_measured else []
        header = ["POD", "ROLE", "NODE", "RESTARTS", *measured, "AGE", "STATE"]
        tables += ["", build_table(header, [_pod_cells(pod, is_measured) for pod in view.pods])]
    return Group(*tables)


def _pod_cells(pod: PodRow, is_measured: bool) -> list[str]:
    measured = []
    if is_measured:
        measured.append("-" if pod.cpu_cores is None else f"{pod.cpu_cores:.2f}")
        measured.append("-" if pod.memory_bytes is None else f"{pod.memory_bytes / 2**20:.0f}Mi")
    return [pod.name, pod.role, pod.node or "-", str(pod.restarts), *measured, pod.age, pod.state]


async def watch(draw: Callable[[], Awaitable[RenderableType]], interval_seconds: float) -> None:
    """Draw repeatedly, in place on a terminal, until interrupted. A failed refresh keeps the last view."""
    last, problem = await draw(), ""  # the first failure ends the command
    console = Console()
    with Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext() as live:
        while True:
            view = Group(last, "", Text(problem)) if problem else last
            if live:
                live.update(view, refresh=True)
            else:
                print(f"{to_text(view)}\n", flush=True)
            await asyncio.sleep(interval_seconds)
            try:
                last, problem = await draw(), ""
            except RLJobError as error:
                problem = f"not up to date: {error}"
