"""The rewards of a run on this machine: what its head and reward servers report at /metrics.

Leaves the meaning of the numbers to reward_rows. Invariant: if a server does not answer, its reward's sums are unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import LABEL_REWARD, PORT_DRIVER, PORT_REWARD
from rljob_cli.manifests import is_ready, labels_of, role_of
from rljob_cli.run.reward_rows import Metrics, RewardInfo, RewardRow, Sample, build_row, parse_metrics
from rljob_operator.backend import Manifest
from rljob_operator.children.common import HEAD


async def fetch_metrics(session: aiohttp.ClientSession, pods: Sequence[Manifest]) -> Metrics:
    """Return the metrics of the ready Pods."""
    heads = [pod for pod in pods if role_of(pod) == HEAD and is_ready(pod)]
    pods_by_reward: dict[str, list[Manifest]] = {}
    for pod in pods:
        if LABEL_REWARD in labels_of(pod) and is_ready(pod):
            pods_by_reward.setdefault(labels_of(pod)[LABEL_REWARD], []).append(pod)
    driver = await _fetch(session, heads[0], PORT_DRIVER) if heads else None
    servers: dict[str, Sequence[Sequence[Sample]] | None] = {}
    for name, replicas in pods_by_reward.items():
        answers = await asyncio.gather(*(_fetch(session, pod, PORT_REWARD) for pod in replicas))
        known = [answer for answer in answers if answer is not None]
        servers[name] = known if len(known) == len(answers) else None
    return Metrics(driver, servers)


async def _fetch(session: aiohttp.ClientSession, pod: Manifest, port: int) -> list[Sample] | None:
    try:
        async with session.get(f"http://{pod['status']['podIP']}:{port}/metrics") as response:
            return (parse_metrics(await response.text()) or None) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


def build_rewards(job: RLJob, pods: Sequence[Manifest], metrics: Metrics) -> tuple[RewardRow, ...]:
    """Return one row per reward of the job."""
    roles = {role.name: role for role in job.status.roles}
    scaling = {decision.name: decision for decision in job.status.scaling}
    rows = []
    for reward in job.spec.rewards:
        role = roles.get(f"reward-{reward.name}")
        ready = sum(labels_of(pod).get(LABEL_REWARD) == reward.name and is_ready(pod) for pod in pods)
        info = RewardInfo(
            name=reward.name,
            spec=reward,
            ready=ready if role else None,
            replicas=role.desired if role else None,
            scaling=scaling.get(reward.name),
        )
        rows.append(build_row(info, metrics))
    return tuple(rows)
