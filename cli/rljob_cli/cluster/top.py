"""What `rljob top` shows: jobs as rows, or one job with its roles, rewards and Pods. Field names are part of --output
json. top_tables.py draws it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rljob_api.quantity import parse_quantity
from rljob_api.wire.contract import LABEL_JOB
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.formatting import Health, describe_pod, describe_stalls, describe_wait, format_age, judge_pod
from rljob_cli.cluster.observation import parse_time
from rljob_cli.cluster.other_versions import parse_status
from rljob_cli.manifests import role_of
from rljob_cli.run.reward_rows import RewardRow
from rljob_core.backend import Manifest
from rljob_core.plan.observed_job import count_restarts, name_of

_WORST_FIRST: tuple[Health, ...] = ("broken", "waiting", "ok")


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
    health: Health


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
        phase=(manifest.get("status") or {}).get("phase") or "Pending",
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
        if (manifest.get("status") or {}).get("conditions")
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
    rows.sort(key=lambda row: (_WORST_FIRST.index(row.health), order.get(row.role, len(order)), row.name))
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
        health=judge_pod(pod),
    )
