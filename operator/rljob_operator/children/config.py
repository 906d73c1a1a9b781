"""The ConfigMaps and the Secret that the programs read.

Invariants: reading job.yaml back gives the same settings, including explicit nulls ('no gradient clipping'). An image
of version 0.1.0, which a running role keeps over an upgrade of the operator, can read the files: they leave out fields
with their default, and later ones that no program reads. Later images ignore what they do not know (`pod_files`).
"""

import base64
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_settings import POD_SETTINGS
from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import FILE_FUNCTION, FILE_JOB, FILE_REWARD
from rljob_operator.backend import Manifest, Owner
from rljob_operator.children.common import build_child, child_name, to_yaml
from rljob_operator.children.pods import TOKEN_KEY
from rljob_operator.children.reward import RewardService

_NOT_READ_OF_ROLE: dict[str, Any] = {
    "backoff_window_seconds": True,
    "startup_timeout_seconds": True,
    "node_pool": {"gpu_resource": True, "topology": True},
}
_NOT_READ_OF_MODEL = {"startup_timeout_seconds": True}
_NOT_READ_OF_SERVICE: dict[str, Any] = {
    **_NOT_READ_OF_ROLE,
    "model": {**_NOT_READ_OF_MODEL, "model": _NOT_READ_OF_MODEL},  # of a reward, and of a user
    "judge": {"model": _NOT_READ_OF_MODEL},
}
_NOT_READ_OF_JOB: dict[str, Any] = {
    **dict.fromkeys((*POD_SETTINGS, "scheduling"), True),
    **dict.fromkeys(("head", "trainer", "rollout"), _NOT_READ_OF_ROLE),
    "rewards": {"__all__": _NOT_READ_OF_SERVICE},
    "agent": {"user": _NOT_READ_OF_SERVICE, "tools": {"__all__": _NOT_READ_OF_ROLE}, "runner": _NOT_READ_OF_ROLE},
}


def build_job_config(job: RLJob) -> Manifest:
    """ConfigMap NAME-config, with name and namespace only: other metadata changes with every write of the job."""
    # Without decided replicas, which no program reads: a scaling decision must not change the file.
    spec = job.spec.with_replicas({each.reward.name: 1 for each in job.spec.services if each.reward.autoscaling})
    document = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": {"name": job.metadata.name, "namespace": job.metadata.namespace},
        "spec": spec.to_manifest(exclude=_NOT_READ_OF_JOB, exclude_defaults=True),
    }
    return build_child("v1", "ConfigMap", job, child_name(job, "config"), {}, data={FILE_JOB: to_yaml(document)})


def build_reward_config(service: RewardService) -> Manifest:
    """ConfigMap of a reward's server. Source code in a user's ConfigMap is mounted from there."""
    reward = _mask_autoscaled_replicas(service.reward)
    data = {FILE_REWARD: to_yaml(reward.to_manifest(exclude=_NOT_READ_OF_SERVICE, exclude_defaults=True))}
    if service.reward.function and service.reward.function.inline is not None:
        data[FILE_FUNCTION] = service.reward.function.inline
    return build_child("v1", "ConfigMap", service.owner, service.name, service.selector, data=data)


def _mask_autoscaled_replicas(reward: Reward) -> Reward:
    """The same of a server's own file."""
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
