"""References of a job to RewardModels, and what they change in its head. Pure.

Leaves the children of a model to `rljob_core.plan.reward_model`. Invariant: a job without references is unchanged.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import Reward, RewardModel
from rljob_api.wire.contract import ENV_REWARD_TOKENS
from rljob_core.backend import ChildKey, Manifest, ObservedState, key_of
from rljob_core.children import common
from rljob_core.children.common import HEAD, TRAINER, WORKLOAD_KINDS
from rljob_core.children.env import TOKEN_KEY


def child_name(name: str) -> str:
    """The name of all children of the RewardModel `name`."""
    return f"{name}-rewardmodel"


def find_frozen_children(
    job: RLJob, observed: ObservedState, desired: Iterable[Manifest], head_exists: bool
) -> frozenset[ChildKey]:
    """Children that stay unchanged while a RewardModel is missing. Without a head no Pod is created, because none could
    work. A running head, its trainers and what it reads are left alone, so that nothing is lost when the model
    returns."""
    names = {reward.reward_model_ref.name for reward in job.spec.rewards if reward.reward_model_ref}
    if names <= observed.reward_models.keys():
        return frozenset()
    if not head_exists:
        return frozenset(key_of(child) for child in desired if child["kind"] in WORKLOAD_KINDS)
    head, trainer = common.child_name(job, HEAD), common.child_name(job, TRAINER)
    config = ChildKey("ConfigMap", common.child_name(job, "config"))
    policies = ChildKey("NetworkPolicy", head), ChildKey("NetworkPolicy", trainer)  # earlier versions made both
    return frozenset({ChildKey("Job", head), ChildKey("StatefulSet", trainer), *policies, config})


def resolve_http(job: RLJob, models: Mapping[str, RewardModel]) -> RLJob:
    """The job as its driver must read it: a reference to an http model becomes an http reward."""
    rewards = [_resolve(reward, _find_model(reward, models)) for reward in job.spec.rewards]
    return job.with_spec(rewards=rewards)


def build_services(job: RLJob, models: Mapping[str, RewardModel]) -> dict[str, str]:
    """Reward name -> host name of its model's Service, for served models."""
    return {reward.name: child_name(model) for _, reward, model in _served(job, models)}


def build_token_env(job: RLJob, models: Mapping[str, RewardModel]) -> list[Manifest]:
    """The env of the head with the tokens of served models; empty if there are none."""
    served = _served(job, models)
    variables = {reward.name: f"RLJOB_REWARD_TOKEN_{index}" for index, reward, _ in served}
    env: list[Manifest] = [
        {"name": variables[reward.name], "valueFrom": {"secretKeyRef": {"name": child_name(model), "key": TOKEN_KEY}}}
        for _, reward, model in served
    ]
    names = {"name": ENV_REWARD_TOKENS, "value": json.dumps(variables, sort_keys=True)}
    return [*env, names] if env else []


def served_models(job: RLJob, models: Mapping[str, RewardModel]) -> list[str]:
    """Names of the served models that the job references."""
    return sorted({name for _, _, name in _served(job, models)})


def read_identities(job: RLJob, models: Mapping[str, RewardModel]) -> dict[str, Any]:
    """What else restarts the driver: a recreated model has a new token. Empty without models, so that the digests of
    other jobs do not change."""
    uids = {name: models[name].metadata.uid for name in served_models(job, models)}
    return {"rewardModels": uids} if uids else {}


def _served(job: RLJob, models: Mapping[str, RewardModel]) -> list[tuple[int, Reward, str]]:
    return [
        (index, reward, model.metadata.name)
        for index, reward in enumerate(job.spec.rewards)
        if (model := _find_model(reward, models)) and model.spec.is_served
    ]


def _find_model(reward: Reward, models: Mapping[str, RewardModel]) -> RewardModel | None:
    return models.get(reward.reward_model_ref.name) if reward.reward_model_ref else None


def _resolve(reward: Reward, model: RewardModel | None) -> Reward:
    if model is None:
        return reward
    update: dict[str, object] = {"timeout_seconds": model.spec.timeout_seconds, "scope": model.spec.scope}
    if model.spec.http is not None:
        update |= {"http": model.spec.http, "reward_model_ref": None}
    else:
        update["slots"] = model.spec.slots  # the driver's limit of concurrent requests per replica
    return reward.model_copy(update=update)
