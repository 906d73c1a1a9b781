"""The ConfigMaps and the Secret that the programs read.

Invariant: reading job.yaml back gives the same spec, including explicit nulls ('no gradient clipping').
"""

import base64

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_settings import POD_SETTINGS
from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import FILE_FUNCTION, FILE_JOB, FILE_REWARD
from rljob_operator.backend import Manifest, Owner
from rljob_operator.children.common import build_child, child_name, to_yaml
from rljob_operator.children.pods import TOKEN_KEY
from rljob_operator.children.reward import RewardService


def build_job_config(job: RLJob) -> Manifest:
    """ConfigMap NAME-config, with name and namespace only: other metadata changes with every write of the job."""
    spec = job.spec.model_copy(update={"rewards": [_mask_autoscaled_replicas(reward) for reward in job.spec.rewards]})
    document = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": {"name": job.metadata.name, "namespace": job.metadata.namespace},
        # Without the fields of Pods, which no program reads: one of an earlier version would refuse them.
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=set(POD_SETTINGS)),
    }
    return build_child("v1", "ConfigMap", job, child_name(job, "config"), {}, data={FILE_JOB: to_yaml(document)})


def build_reward_config(service: RewardService) -> Manifest:
    """ConfigMap of a reward. Source code in a user's ConfigMap is mounted from there."""
    data = {FILE_REWARD: to_yaml(_mask_autoscaled_replicas(service.reward).to_manifest())}
    if service.reward.function and service.reward.function.inline is not None:
        data[FILE_FUNCTION] = service.reward.function.inline
    return build_child("v1", "ConfigMap", service.owner, service.name, service.selector, data=data)


def _mask_autoscaled_replicas(reward: Reward) -> Reward:
    """Without the decided replicas, which no program reads: a scaling decision must not change the file."""
    return reward.model_copy(update={"replicas": 1}) if reward.autoscaling else reward


def build_token_secret(owner: Owner, name: str, token: str) -> Manifest:
    """Secret with the token. It is immutable, so that an operator with an outdated cache cannot change it while Pods
    run."""
    data = {TOKEN_KEY: base64.b64encode(token.encode()).decode()}
    return build_child("v1", "Secret", owner, name, {}, type="Opaque", immutable=True, data=data)


def read_token(secret: Manifest | None) -> str | None:
    """The token in a Secret; None if it has none."""
    encoded = (secret or {}).get("data", {}).get(TOKEN_KEY)
    return base64.b64decode(encoded).decode() if encoded else None
