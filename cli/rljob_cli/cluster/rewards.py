"""The rewards of a job in a cluster: from the job, its RewardModels, and the /metrics of its head and reward Pods.

Reads /metrics through the API server's Pod proxy, a few Pods at a time. What cannot be read is unknown: the rest of
the table is still useful. Leaves the meaning of the numbers to reward_rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pydantic import ValidationError

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward, RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import LABEL_REWARD_MODEL, PORT_DRIVER, PORT_REWARD
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.observation import parse_reward_models
from rljob_cli.manifests import role_of
from rljob_cli.run.reward_rows import Metrics, RewardInfo, RewardRow, Sample, build_row, parse_metrics
from rljob_operator.backend import Manifest
from rljob_operator.plan.observed_job import is_ready, name_of

_MAX_CONCURRENT_REQUESTS = 16
_MAX_PODS_PER_REWARD = 128
"""`top` must not take minutes, and a sum over some of the Pods would be wrong."""


async def fetch_rewards(cluster: Cluster, manifest: Manifest, pods: Sequence[Manifest]) -> list[RewardRow]:
    """Return one row per reward; none if the job does not match this version."""
    try:
        job = RLJob.model_validate(manifest)
    except ValidationError:
        return []
    models = await _fetch_models(cluster) if any(reward.reward_model_ref for reward in job.spec.rewards) else {}
    semaphore = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

    async def read(pod: str, port: int) -> list[Sample] | None:
        async with semaphore:
            try:
                return parse_metrics(await cluster.read_pod_metrics(pod, port)) or None
            except ClusterError:
                return None

    async def read_servers(reward: Reward) -> list[list[Sample]] | None:
        names = await _ready_pods(cluster, reward, pods)
        answers = [] if names is None else await asyncio.gather(*(read(name, PORT_REWARD) for name in names))
        known = [answer for answer in answers if answer is not None]
        return known if names is not None and len(known) == len(names) else None

    heads = [name_of(pod) for pod in pods if role_of(pod) == "head" and is_ready(pod)]
    driver = await read(heads[0], PORT_DRIVER) if heads else None
    servers = await asyncio.gather(*map(read_servers, job.spec.rewards))
    metrics = Metrics(driver, {r.name: found for r, found in zip(job.spec.rewards, servers, strict=True)})
    return [build_row(build_info(reward, job.status, models), metrics) for reward in job.spec.rewards]


def build_info(reward: Reward, status: RLJobStatus, models: dict[str, RewardModel]) -> RewardInfo:
    """What the job's objects say about one reward."""
    if reward.reward_model_ref is not None:
        model = models.get(reward.reward_model_ref.name)
        if model is None:
            return RewardInfo(reward.name)
        if model.spec.http is not None:
            return RewardInfo(reward.name, model.spec)
        desired = model.status.scaling.replicas if model.status.scaling else model.spec.replicas
        return RewardInfo(reward.name, model.spec, model.status.ready_replicas, desired, model.status.scaling)
    role = next((role for role in status.roles if role.name == f"reward-{reward.name}"), None)
    scaling = next((scaling for scaling in status.scaling if scaling.name == reward.name), None)
    return RewardInfo(reward.name, reward, role.ready if role else None, role.desired if role else None, scaling)


async def _fetch_models(cluster: Cluster) -> dict[str, RewardModel]:
    try:
        return parse_reward_models(await cluster.list_reward_models())
    except ClusterError:
        return {}


async def _ready_pods(cluster: Cluster, reward: Reward, pods: Sequence[Manifest]) -> list[str] | None:
    """Return the names of the reward's ready Pods. None: unknown, or too many to read."""
    if reward.reward_model_ref is not None:
        try:
            found = await cluster.list_pods(f"{LABEL_REWARD_MODEL}={reward.reward_model_ref.name}")
        except ClusterError:
            return None
    else:
        found = [pod for pod in pods if role_of(pod) == f"reward-{reward.name}"]
    names = [name_of(pod) for pod in found if is_ready(pod)]
    return names if len(names) <= _MAX_PODS_PER_REWARD else None
