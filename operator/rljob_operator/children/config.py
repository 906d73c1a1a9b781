"""ConfigMaps and the Secret: what the programs read. Every role's file is written here and nowhere else.

Invariant: reading job.yaml back gives exactly the same spec, explicit nulls ('no gradient clipping') included.
"""

from __future__ import annotations

import base64

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import FILE_FUNCTION, FILE_JOB, FILE_REWARD
from rljob_operator.backend import Manifest
from rljob_operator.children.common import Owner, build_metadata, child_name, to_yaml
from rljob_operator.children.pods import TOKEN_KEY
from rljob_operator.children.reward import RewardService


def build_job_config(job: RLJob) -> Manifest:
    """ConfigMap NAME-config. Of the metadata only what identifies the job: the rest changes with every write."""
    spec = job.spec.model_copy(update={"rewards": [_mask_autoscaled_replicas(reward) for reward in job.spec.rewards]})
    document = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": {"name": job.metadata.name, "namespace": job.metadata.namespace},
        "spec": spec.to_manifest(),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build_metadata(job, child_name(job, "config")),
        "data": {FILE_JOB: to_yaml(document)},
    }


def build_reward_config(service: RewardService) -> Manifest:
    """ConfigMap of a reward's name. A source from the user's own ConfigMap is mounted from there instead."""
    data = {FILE_REWARD: to_yaml(_mask_autoscaled_replicas(service.reward).to_manifest())}
    if service.reward.function and service.reward.function.inline is not None:
        data[FILE_FUNCTION] = service.reward.function.inline
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build_metadata(service.owner, service.name, service.selector),
        "data": data,
    }


def _mask_autoscaled_replicas(reward: Reward) -> Reward:
    """Without the number of the moment, which no program reads: an autoscaler's decision changes no file."""
    return reward.model_copy(update={"replicas": 1}) if reward.autoscaling else reward


def build_token_secret(owner: Owner, name: str, token: str) -> Manifest:
    """Secret with the token. Immutable, so that an operator with an old view of the cluster cannot change it under
    running Pods: the API server refuses."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": build_metadata(owner, name),
        "type": "Opaque",
        "immutable": True,
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }


def read_token(secret: Manifest) -> str | None:
    """The token that a Secret holds; None when it holds none that can be used."""
    encoded = secret.get("data", {}).get(TOKEN_KEY)
    return base64.b64decode(encoded).decode() if encoded else None
