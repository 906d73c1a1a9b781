"""The reward services: for each function reward a Deployment and a headless Service. An http reward has no child.

They run the user's own code, so they get least: no job file, no service-account token, a read-only root, scratch
space that dies with the Pod.
"""

from __future__ import annotations

import math

from rljob_api.contract import FILE_FUNCTION, FILE_REWARD, PATH_CONFIG, PATH_SCRATCH, PORT_REWARD
from rljob_api.job import RLJob
from rljob_api.reward import Reward
from rljob_operator.backend import Manifest
from rljob_operator.children import pods
from rljob_operator.children.common import (
    REWARD,
    build_headless_service,
    build_metadata,
    build_selector,
    digest,
    reward_name,
)
from rljob_operator.defaults import Defaults

_PORTS = {"http": PORT_REWARD}
_STARTUP_SECONDS = 600
"""A function may load a model when it is imported."""
_DRAIN_SECONDS = 10
"""For the answers to leave after the last execution has ended."""
_LEAVE_SECONDS = 5
"""A server that goes is out of the Service at once; so long the driver may still send it requests."""
_READ_BY_DRIVER = {"weight", "failurePolicy"}


def build_reward(job: RLJob, index: int, token: str, defaults: Defaults) -> list[Manifest]:
    """Service and Deployment of the index-th reward; nothing when it is someone else's endpoint."""
    reward = job.spec.rewards[index]
    if reward.function is None:
        return []
    selector = build_selector(job, REWARD, reward)
    name = reward_name(job, reward)
    return [
        build_headless_service(job, name, selector, _PORTS, publish_not_ready=False),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": build_metadata(job, name, selector),
            "spec": {
                "replicas": reward.replicas,
                "selector": {"matchLabels": selector},
                "template": pods.build_pod_template(job, _build_parts(job, index, token, selector, defaults)),
            },
        },
    ]


def _build_parts(job: RLJob, index: int, token: str, selector: dict[str, str], defaults: Defaults) -> pods.PodParts:
    reward = job.spec.rewards[index]
    return pods.PodParts(
        role=REWARD,
        spec=reward,
        spec_path=f"spec.rewards[{index}]",
        image=defaults.reward_image,
        command=[
            *("python", "-m", "rljob_reward", "--config", f"{PATH_CONFIG}/{FILE_REWARD}"),
            *("--grace", str(math.ceil(reward.timeout_seconds))),
        ],
        labels=selector,
        config=pods.read_settings(reward, pods.POD_FIELDS | _READ_BY_DRIVER) | {"token": digest(token)},
        ports=_PORTS,
        env=pods.build_token_env(job),
        probes=pods.build_probes("http", _STARTUP_SECONDS),
        volumes=[
            _build_config_volume(job, reward),
            pods.Volume("scratch", {"emptyDir": {}}, PATH_SCRATCH),
            pods.Volume("tmp", {"emptyDir": {}}, "/tmp"),
        ],
        grace_seconds=_LEAVE_SECONDS + math.ceil(reward.timeout_seconds) + _DRAIN_SECONDS,
        drain_seconds=_LEAVE_SECONDS,
        container_security={"readOnlyRootFilesystem": True},
    )


def _build_config_volume(job: RLJob, reward: Reward) -> pods.Volume:
    """reward.yaml, with function.py beside it: ours for an inline source, else from the user's own ConfigMap."""
    name = reward_name(job, reward)
    reference = reward.function.config_map_key_ref if reward.function else None
    if reference is None:
        return pods.Volume("config", {"configMap": {"name": name}}, PATH_CONFIG, read_only=True)
    theirs = {"name": reference.name, "items": [{"key": reference.key, "path": FILE_FUNCTION}]}
    sources = [{"configMap": {"name": name}}, {"configMap": theirs}]
    return pods.Volume("config", {"projected": {"sources": sources}}, PATH_CONFIG, read_only=True)
