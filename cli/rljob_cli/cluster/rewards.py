"""A job's rewards in a cluster: from the job, its RewardModels, and the /metrics of its head and reward Pods.

Asks through the API server's Pod proxy, a few Pods at a time, and takes each refusal for 'not known': the table of a
job is worth having without it. Leaves what the numbers mean to reward_rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward, RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import LABEL_REWARD_MODEL, PORT_DRIVER, PORT_REWARD
from rljob_cli.cluster.client import Cluster, ClusterError, Manifest
from rljob_cli.cluster.formatting import role_of
from rljob_cli.run.reward_rows import Metrics, Part, RewardRow, Sample, build_row, parse_metrics
from rljob_operator.plan.observed_job import is_ready, name_of

_NUM_ASKED_AT_ONCE = 16
_MAX_PODS_ASKED = 128
"""Of one reward. A look must not take minutes, and a sum over some of the Pods would be wrong."""


def fetch_rewards(cluster: Cluster, manifest: Manifest, pods: Sequence[Manifest]) -> list[RewardRow]:
    """A row for each reward; none where the job is not one of this version's."""
    try:
        job = RLJob.model_validate(manifest)
    except ValidationError:
        return []
    models = _fetch_models(cluster) if any(reward.reward_model_ref for reward in job.spec.rewards) else {}
    parts = [build_part(reward, job.status, models) for reward in job.spec.rewards]
    ready = {reward.name: _ready_pods(cluster, reward, pods) for reward in job.spec.rewards}
    heads = [name_of(pod) for pod in pods if role_of(pod) == "head" and is_ready(pod)]
    with ThreadPoolExecutor(_NUM_ASKED_AT_ONCE) as asking:
        told = list(asking.map(lambda head: _read(cluster, head, PORT_DRIVER), heads[:1]))
        servers = {
            name: None if names is None else list(asking.map(lambda pod: _read(cluster, pod, PORT_REWARD), names))
            for name, names in ready.items()
        }
    metrics = Metrics(told[0] if told else None, {name: _all_of(answers) for name, answers in servers.items()})
    return [build_row(part, metrics) for part in parts]


def build_part(reward: Reward, status: RLJobStatus, models: dict[str, RewardModel]) -> Part:
    """What the job's objects say of one reward."""
    if reward.reward_model_ref is not None:
        model = models.get(reward.reward_model_ref.name)
        if model is None:
            return Part(reward.name)
        wanted = model.status.scaling.replicas if model.status.scaling else model.spec.replicas
        if model.spec.http is not None:
            return Part(reward.name, model.spec)
        return Part(reward.name, model.spec, model.status.ready_replicas, wanted, model.status.scaling)
    role = next((role for role in status.roles if role.name == f"reward-{reward.name}"), None)
    scaling = next((scaling for scaling in status.scaling if scaling.name == reward.name), None)
    return Part(reward.name, reward, role.ready if role else None, role.desired if role else None, scaling)


def _fetch_models(cluster: Cluster) -> dict[str, RewardModel]:
    try:
        manifests = cluster.list_reward_models()
    except ClusterError:
        return {}
    models = {}
    for manifest in manifests:
        try:
            models[manifest["metadata"]["name"]] = RewardModel.model_validate(manifest)
        except ValidationError:
            continue
    return models


def _ready_pods(cluster: Cluster, reward: Reward, pods: Sequence[Manifest]) -> list[str] | None:
    """Names of those to ask; None: they are not known, or too many."""
    if reward.reward_model_ref is not None:
        try:
            found = cluster.list_pods(f"{LABEL_REWARD_MODEL}={reward.reward_model_ref.name}")
        except ClusterError:
            return None
    else:
        found = [pod for pod in pods if role_of(pod) == f"reward-{reward.name}"]
    names = [name_of(pod) for pod in found if is_ready(pod)]
    return names if len(names) <= _MAX_PODS_ASKED else None


def _read(cluster: Cluster, pod: str, port: int) -> list[Sample] | None:
    try:
        return parse_metrics(cluster.read_pod_metrics(pod, port)) or None
    except ClusterError:
        return None


def _all_of(answers: Sequence[list[Sample] | None] | None) -> list[list[Sample]] | None:
    known = [answer for answer in answers or () if answer is not None]
    return known if answers is not None and len(known) == len(answers) else None
