"""top: jobs as rows of a table, or one job with its roles, rewards and Pods. Pure, but for fetch_* and watch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from rljob_api.errors import RLJobError
from rljob_api.wire.contract import LABEL_JOB
from rljob_cli.cluster.client import Cluster, ClusterError, Manifest
from rljob_cli.cluster.formatting import describe_pod, describe_wait, format_age, format_table, restarts_of, role_of
from rljob_cli.cluster.observation import parse_status, parse_time
from rljob_cli.run.reward_rows import HEADER, RewardRow, row_cells
from rljob_operator.plan.observed_job import name_of

_CLEAR = "\x1b[H\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_MIB = 2**20
_MAX_WAIT_LENGTH = 100
"""In the table; explain and JSON have all of it."""


@dataclass(frozen=True)
class JobRow:
    """One job. None: the status does not say."""

    namespace: str
    name: str
    phase: str
    step: int
    total_steps: int
    reward: float | None
    rollouts: str
    rewards: str
    does: str
    """What the driver is doing, of a job that runs."""
    age: str
    waits_for: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PodRow:
    name: str
    role: str
    node: str
    state: str
    restarts: int
    cpu_cores: float | None
    """In use, by metrics.k8s.io; None: it does not say."""
    memory_bytes: int | None
    age: str


@dataclass(frozen=True)
class JobView:
    """One job with its roles and Pods."""

    job: JobRow
    roles: list[dict[str, Any]]
    rewards: list[RewardRow]
    pods: list[PodRow]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def view_row(manifest: Manifest, now: datetime) -> JobRow:
    metadata, status = manifest["metadata"], parse_status(manifest)
    progress = status.progress
    return JobRow(
        namespace=metadata["namespace"],
        name=metadata["name"],
        phase=status.phase or "Pending",
        step=progress.step,
        total_steps=progress.total_steps,
        reward=progress.reward,
        rollouts=status.rollouts,
        rewards=status.rewards,
        does=progress.phase if status.phase in ("Running", "Restarting") else "",
        age=format_age(parse_time(metadata.get("creationTimestamp")), now),
        waits_for=describe_wait(status) if status.conditions else "the operator has not looked at it: does it run?",
    )


def view_jobs(manifests: list[Manifest], now: datetime) -> list[JobRow]:
    rows = [view_row(manifest, now) for manifest in manifests]
    return sorted(rows, key=lambda row: (row.namespace, row.name))


def fetch_pods(cluster: Cluster, name: str) -> tuple[list[Manifest], list[Manifest]]:
    """A job's Pods and their metrics; no metrics where metrics.k8s.io does not answer."""
    selector = f"{LABEL_JOB}={name}"
    try:
        metrics = cluster.list_pod_metrics(selector)
    except ClusterError:
        metrics = []
    return cluster.list_pods(selector), metrics


def view_job(
    manifest: Manifest,
    pods: list[Manifest],
    metrics: list[Manifest],
    now: datetime,
    rewards: Sequence[RewardRow] = (),
) -> JobView:
    usage = {metric["metadata"]["name"]: metric.get("containers") or [] for metric in metrics}
    roles = [role.model_dump() for role in parse_status(manifest).roles]
    order = {role["name"]: index for index, role in enumerate(roles)}
    rows = [_view_pod(pod, usage.get(name_of(pod)), now) for pod in pods]
    rows.sort(key=lambda row: (order.get(row.role, len(order)), row.name))
    return JobView(view_row(manifest, now), roles, list(rewards), rows)


def _view_pod(pod: Manifest, containers: list[Manifest] | None, now: datetime) -> PodRow:
    def total(resource: str) -> float | None:
        if not containers:
            return None
        return float(sum(parse_quantity(c["usage"][resource]) for c in containers if resource in c.get("usage", {})))

    memory = total("memory")
    return PodRow(
        name=name_of(pod),
        role=role_of(pod),
        node=pod["spec"].get("nodeName") or "",
        state=describe_pod(pod),
        restarts=restarts_of(pod),
        cpu_cores=total("cpu"),
        memory_bytes=None if memory is None else int(memory),
        age=format_age(parse_time(pod["metadata"].get("creationTimestamp")), now),
    )


def format_jobs(rows: list[JobRow], namespace: str, everywhere: bool, width: int | None) -> str:
    if not rows:
        where = "any namespace" if everywhere else f"namespace {namespace} (-A: all namespaces)"
        return f"no RLJobs in {where}"
    header = ["NAME", "PHASE", "STEP", "REWARD", "ROLLOUTS", "REWARDS", "DOES", "AGE", "WAITS FOR"]
    cells = [_cells(row) for row in rows]
    if everywhere:
        header = ["NAMESPACE", *header]
        cells = [[row.namespace, *line] for row, line in zip(rows, cells, strict=True)]
    return "\n".join(format_table(header, cells, width))


def _cells(row: JobRow) -> list[str]:
    step = f"{row.step}/{row.total_steps}" if row.total_steps else "-"
    reward = "-" if row.reward is None else f"{row.reward:.3f}"
    waits = row.waits_for
    waits = waits if len(waits) <= _MAX_WAIT_LENGTH else f"{waits[: _MAX_WAIT_LENGTH - 1]}…"
    return [
        *(row.name, row.phase, step, reward, row.rollouts or "-", row.rewards or "-", row.does or "-", row.age),
        waits,
    ]


def format_job(view: JobView, width: int | None) -> str:
    lines = format_jobs([view.job], view.job.namespace, False, width).splitlines()
    if view.roles:
        roles = [[r["name"], f"{r['ready']}/{r['desired']}", str(r["restarts"])] for r in view.roles]
        lines += ["", *format_table(["ROLE", "READY", "RESTARTS"], roles, width)]
    if view.rewards:
        lines += ["", *format_table(HEADER, [row_cells(row) for row in view.rewards], width, gap=2)]
    if view.pods:
        is_measured = any(pod.cpu_cores is not None for pod in view.pods)
        measured = ["CPU", "MEMORY"] if is_measured else []
        header = ["POD", "ROLE", "NODE", "RESTARTS", *measured, "AGE", "STATE"]
        lines += ["", *format_table(header, [_pod_cells(pod, is_measured) for pod in view.pods], width)]
    return "\n".join(lines)


def _pod_cells(pod: PodRow, is_measured: bool) -> list[str]:
    measured = []
    if is_measured:
        measured.append("-" if pod.cpu_cores is None else f"{pod.cpu_cores:.2f}")
        measured.append("-" if pod.memory_bytes is None else f"{pod.memory_bytes / _MIB:.0f}Mi")
    return [pod.name, pod.role, pod.node or "-", str(pod.restarts), *measured, pod.age, pod.state]


def watch(draw: Callable[[], str], interval_seconds: float) -> None:
    """Draw again and again, in place on a terminal, until interrupted. A failed look keeps what was last seen."""
    last = draw()  # the first failure ends the command
    in_place = sys.stdout.isatty()
    print(_HIDE_CURSOR if in_place else "", end="")
    try:
        trouble = ""
        while True:
            text = "\n".join(filter(None, [last, trouble]))
            print(f"{_CLEAR}{text}" if in_place else f"{text}\n", flush=True)
            time.sleep(interval_seconds)
            try:
                last, trouble = draw(), ""
            except RLJobError as error:
                trouble = f"\nnot up to date: {error}"
    finally:
        print(_SHOW_CURSOR if in_place else "", end="", flush=True)
