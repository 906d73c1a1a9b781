"""The rewards of a run on this machine: what its head and reward servers report at /metrics."""

from collections.abc import Sequence

import aiohttp

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import LABEL_REWARD
from rljob_cli.manifests import is_ready, labels_of, role_of
from rljob_cli.run.reward_rows import RewardMetrics, RewardRow, build_row, gather_metrics
from rljob_operator.backend import Manifest
from rljob_operator.children.common import HEAD


async def fetch_metrics(session: aiohttp.ClientSession, pods: Sequence[Manifest]) -> RewardMetrics:
    async def read(pod: Manifest, port: int) -> str:
        try:
            async with session.get(f"http://{pod['status']['podIP']}:{port}/metrics") as response:
                return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return ""

    ready = [pod for pod in pods if is_ready(pod)]
    servers: dict[str, list[Manifest]] = {}
    for pod in ready:
        if reward := labels_of(pod).get(LABEL_REWARD):
            servers.setdefault(reward, []).append(pod)
    return await gather_metrics(read, [pod for pod in ready if role_of(pod) == HEAD], servers)


def build_rewards(job: RLJob, pods: Sequence[Manifest], metrics: RewardMetrics) -> tuple[RewardRow, ...]:
    roles = {role.name: role for role in job.status.roles}
    scaling = {decision.name: decision for decision in job.status.scaling}
    rows = []
    for reward in job.spec.rewards:
        role = roles.get(f"reward-{reward.name}")
        ready = sum(labels_of(pod).get(LABEL_REWARD) == reward.name and is_ready(pod) for pod in pods)
        desired = role.desired if role else None
        rows.append(build_row(metrics, reward.name, reward, ready if role else None, desired, scaling.get(reward.name)))
    return tuple(rows)
