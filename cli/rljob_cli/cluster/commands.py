"""The commands on a cluster's jobs, from arguments to exit code.

1: the cluster did not answer, or refused. 2: the job does not exist, or does not allow what the command does.

Reads /metrics of a job's head and of the Pods of its rewards through the API server's Pod proxy. What cannot be read is
unknown: the rest is still useful.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Concatenate

from rich.console import RenderableType

from rljob_api.errors import UserError
from rljob_api.manifest.job_spec import Service
from rljob_api.manifest.services.reward import Reward, RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import LABEL_REWARD_MODEL
from rljob_cli.cluster import control, logs, top, top_tables
from rljob_cli.cluster.client import Cluster, ClusterError, connect
from rljob_cli.cluster.explain import explain
from rljob_cli.cluster.explanation import DEFAULT_WIDTH, format_explanation
from rljob_cli.cluster.head_files import Select, copy_run
from rljob_cli.cluster.observation import fetch_observation
from rljob_cli.cluster.other_versions import parse_job, parse_reward_models, parse_status
from rljob_cli.cluster.watch import watch as watch_view
from rljob_cli.exits import EXIT_INTERRUPTED, P
from rljob_cli.manifests import role_of
from rljob_cli.options import Target
from rljob_cli.output import print_json
from rljob_cli.run.reward_rows import RewardMetrics, RewardRow, build_row, gather_metrics
from rljob_cli.tables import choose_width, show
from rljob_core.backend import Manifest, utc_now
from rljob_core.children.common import role_of_service
from rljob_core.kube.resources import RLJOB
from rljob_core.plan.observed_job import is_ready, name_of

_MAX_CONCURRENT_REQUESTS = 16
_MAX_PODS_PER_REWARD = 128
"""`top` must not take minutes, and a sum over some of the Pods would be wrong."""


async def fetch_rewards(cluster: Cluster, manifest: Manifest, pods: Sequence[Manifest]) -> list[RewardRow]:
    """Return one row per reward and service of the agent; none if this version cannot read the job's spec."""
    job, status = parse_job(manifest), parse_status(manifest)
    if job is None:
        return []
    rewards = job.spec.rewards
    models = await _fetch_models(cluster) if any(reward.reward_model_ref for reward in rewards) else {}
    semaphore = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

    async def read(pod: Manifest, port: int) -> str:
        async with semaphore:
            try:
                return await cluster.read_pod_metrics(name_of(pod), port)
            except ClusterError:
                return ""

    ready = [pod for pod in pods if is_ready(pod)]
    services = job.spec.services
    servers = {each.settings.name: await _find_servers(cluster, each, ready) for each in services}
    metrics = await gather_metrics(read, [pod for pod in ready if role_of(pod) == "head"], servers)
    return [_build_row(metrics, service, status, models) for service in services]


def _build_row(
    metrics: RewardMetrics, service: Service, status: RLJobStatus, models: dict[str, RewardModel]
) -> RewardRow:
    settings, reference = service.settings, _find_reference(service)
    if reference is not None:
        model = models.get(reference)
        if model is None or model.spec.http is not None:
            return build_row(metrics, settings.name, model.spec if model else None)
        scaling = model.status.scaling
        replicas = scaling.replicas if scaling else model.spec.replicas
        return build_row(metrics, settings.name, model.spec, model.status.ready_replicas, replicas, scaling)
    role = next((role for role in status.roles if role.name == f"{role_of_service(service)}-{settings.name}"), None)
    scaling = next((scaling for scaling in status.scaling if scaling.name == settings.name), None)
    ready, desired = (role.ready, role.desired) if role else (None, None)
    return build_row(metrics, settings.name, settings, ready, desired, scaling, service.kind)


def _find_reference(service: Service) -> str | None:
    """Return the name of the RewardModel that a reward refers to."""
    settings = service.settings
    return settings.reward_model_ref.name if isinstance(settings, Reward) and settings.reward_model_ref else None


async def _fetch_models(cluster: Cluster) -> dict[str, RewardModel]:
    try:
        return parse_reward_models(await cluster.list_reward_models())
    except ClusterError:
        return {}


async def _find_servers(cluster: Cluster, service: Service, ready: Sequence[Manifest]) -> list[Manifest] | None:
    """Return the service's ready Pods. None: unknown, or too many to read."""
    reference = _find_reference(service)
    if reference is None:
        found = [pod for pod in ready if role_of(pod) == f"{role_of_service(service)}-{service.settings.name}"]
    else:
        try:
            pods = await cluster.list_pods(f"{LABEL_REWARD_MODEL}={reference}")
        except ClusterError:
            return None
        found = [pod for pod in pods if is_ready(pod)]
    return found if len(found) <= _MAX_PODS_PER_REWARD else None


_WATCH_SECONDS = 2.0


def on_cluster(command: Callable[Concatenate[Cluster, P], Awaitable[int]]) -> Callable[Concatenate[Target, P], int]:
    """Connect to the target, and run the command."""

    def run(target: Target, *args: P.args, **kwargs: P.kwargs) -> int:
        async def connected() -> int:
            async with connect(target) as cluster:
                return await command(cluster, *args, **kwargs)

        try:
            return asyncio.run(connected())
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return run


@on_cluster
async def control_command(cluster: Cluster, verb: str, name: str, output: str, *, force: bool = False) -> int:
    job = await cluster.get_job(name)
    return await _apply_change(cluster, verb, job, control.plan_change(verb, job, utc_now(), force=force), output)


@on_cluster
async def restart_command(cluster: Cluster, name: str, roles: list[str], *, force: bool, output: str) -> int:
    job = await cluster.get_job(name)
    change = control.plan_restart(job, roles, utc_now(), force=force)
    return await _apply_change(cluster, "restart", job, change, output)


async def _apply_change(cluster: Cluster, verb: str, job: Manifest, change: control.Change, output: str) -> int:
    name = job["metadata"]["name"]
    if change.patch is not None:
        await cluster.patch(RLJOB, name, change.patch)
    about = {"command": verb, "namespace": job["metadata"]["namespace"], "name": job["metadata"]["name"]}
    about |= {"changed": change.patch is not None, "message": change.message}
    if output == "json":
        print_json(about)
    else:
        print(change.message)
    return 0


@on_cluster
async def explain_command(cluster: Cluster, name: str, output: str) -> int:
    explanation = explain(await fetch_observation(cluster, name))
    if output == "json":
        print_json(explanation.to_json())
    else:
        print(format_explanation(explanation, utc_now(), choose_width(DEFAULT_WIDTH)))
    return 0


@on_cluster
async def top_command(cluster: Cluster, name: str | None, *, everywhere: bool, watch: bool, output: str) -> int:
    if name and everywhere:
        raise UserError("-A lists the jobs of all namespaces; leave out NAME, or pass -n NAMESPACE")
    if watch and output == "json":
        raise UserError("--watch shows a table; to poll JSON, run the command repeatedly without --watch")

    async def view() -> tuple[RenderableType, Any]:
        if name is None:
            rows = top.view_jobs(await cluster.list_jobs(everywhere), utc_now())
            return top_tables.draw_jobs(rows, cluster.namespace, everywhere), [asdict(row) for row in rows]
        manifest = await cluster.get_job(name)
        pods, usage = await top.fetch_pods(cluster, name)
        job = top.view_job(manifest, pods, usage, utc_now(), await fetch_rewards(cluster, manifest, pods))
        return top_tables.draw_job(job), asdict(job)

    async def draw() -> RenderableType:
        return (await view())[0]

    if watch:
        await watch_view(draw, _WATCH_SECONDS)
    elif output == "json":
        print_json((await view())[1])
    else:
        show(await draw())
    return 0


def list_jobs(target: Target, everywhere: bool) -> list[top.JobRow]:
    """Return a row for each job. Raise ClusterError."""

    async def read() -> list[top.JobRow]:
        async with connect(target) as cluster:
            return top.view_jobs(await cluster.list_jobs(everywhere), utc_now())

    return asyncio.run(read())


@on_cluster
async def with_copy(cluster: Cluster, job: str, select: Select, use: Callable[[Path], int]) -> int:
    """Call `use` with a copy of a job's run, which is deleted afterwards. Return its exit code."""
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        copy = Path(folder) / job
        copy.mkdir()
        await copy_run(cluster, job, copy, select)
        return use(copy)


@on_cluster
async def logs_command(cluster: Cluster, selection: logs.Selection, *, follow: bool) -> int:
    if follow and selection.previous:
        raise UserError("--previous shows containers that have ended, so there is nothing to follow; leave out -f")
    return await (logs.follow_logs(cluster, selection) if follow else logs.print_logs(cluster, selection))
