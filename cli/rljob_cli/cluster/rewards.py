"""The rewards of a job in a cluster, and the services of its agent: from the job, its RewardModels, and the /metrics of
its head and of their Pods.

Reads /metrics through the API server's Pod proxy. What cannot be read is unknown: the rest is still useful.
"""

import asyncio
from collections.abc import Sequence

from rljob_api.manifest.job_spec import Service
from rljob_api.manifest.services.reward import Reward, RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import LABEL_REWARD_MODEL
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.other_versions import parse_job, parse_reward_models, parse_status
from rljob_cli.manifests import role_of
from rljob_cli.run.reward_rows import RewardMetrics, RewardRow, build_row, gather_metrics
from rljob_core.backend import Manifest
from rljob_core.children.common import role_of_service
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
