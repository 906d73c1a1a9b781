"""The reward services: a Deployment and a headless Service for each function, model and judge, be it a job's own or a
RewardModel. An http reward has no child.

They run the user's own code, so they get least: no job file, no service-account token, a read-only root, scratch
space that dies with the Pod. Invariant: what belongs to a job and what to a RewardModel differ in names, labels and
token alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward, RewardModel
from rljob_api.manifest.scorers import EndpointLimits
from rljob_api.wire.contract import (
    ENV_JUDGE_API_KEY,
    ENV_PEERS,
    ENV_REWARD_IMAGES,
    FILE_FUNCTION,
    FILE_REWARD,
    LABEL_REWARD_MODEL,
    LABEL_ROLE,
    PATH_CONFIG,
    PATH_SCRATCH,
    PORT_REWARD,
)
from rljob_operator.backend import Manifest
from rljob_operator.children import pods, reward_refs, reward_vllm
from rljob_operator.children.common import (
    REWARD,
    Owner,
    build_headless_service,
    build_metadata,
    build_selector,
    child_name,
    digest,
    reward_name,
)
from rljob_operator.defaults import Defaults

_PORTS = {"http": PORT_REWARD}
_STARTUP_SECONDS = 600
"""A function may load a model when it is imported."""
_DRAIN_SECONDS = 10
"""For the answers to leave after the last execution has ended."""
_PRE_STOP_SECONDS = 5
"""A server that goes is out of the Service at once; so long the driver may still send it requests."""
_MAX_SURGE = "25%"
"""Rounded up: one Pod at least."""
_READ_BY_DRIVER = {"weight", "failurePolicy", "deadlineSeconds", "hedging"}
_SCORING = (REWARD, reward_vllm.CONTAINER)
"""Containers whose images make a version: what a template adds beside them does not score."""
_NAME_IN_SERVER = "rewardmodel"
"""A reward's name has 15 characters at most, a RewardModel's more. The Pods' labels tell models apart."""


@dataclass(frozen=True)
class RewardService:
    """One reward that we serve."""

    owner: Owner
    reward: Reward
    """What its server reads."""
    path: str
    """Where it stands in its owner's manifest."""
    name: str
    """Name of all its children."""
    selector: dict[str, str]
    token_secret: str


def find_services(job: RLJob) -> list[RewardService]:
    """The job's own rewards that we serve."""
    return [
        RewardService(
            owner=job,
            reward=reward,
            path=f"spec.rewards[{index}]",
            name=reward_name(job, reward),
            selector=build_selector(job, REWARD, reward),
            token_secret=child_name(job, "token"),
        )
        for index, reward in enumerate(job.spec.rewards)
        if reward.is_served
    ]


def build_model_selector(name: str) -> dict[str, str]:
    """Labels that find the Pods of a RewardModel."""
    return {LABEL_REWARD_MODEL: name, LABEL_ROLE: REWARD}


def service_of(model: RewardModel) -> RewardService:
    """A RewardModel that we serve."""
    name = reward_refs.child_name(model.metadata.name)
    return RewardService(
        owner=model,
        reward=Reward.model_validate({**model.spec.to_manifest(), "name": _NAME_IN_SERVER}),
        path="spec",
        name=name,
        selector=build_model_selector(model.metadata.name),
        token_secret=name,
    )


def build_reward(service: RewardService, token: str, defaults: Defaults) -> list[Manifest]:
    """Service and Deployment. Raises UserError for a template that cannot be merged."""
    owner, name, selector = service.owner, service.name, service.selector
    template = pods.build_pod_template(owner, _build_parts(service, token, defaults))
    _add_images_env(template)
    return [
        build_headless_service(owner, name, selector, _PORTS, publish_not_ready=False),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": build_metadata(owner, name, selector),
            "spec": {
                "replicas": service.reward.replicas,
                "strategy": {"type": "RollingUpdate", "rollingUpdate": _build_update_strategy(owner)},
                "selector": {"matchLabels": selector},
                "template": template,
            },
        },
    ]


def _build_update_strategy(owner: Owner) -> Manifest:
    """No capacity is lost: an old Pod goes when a new one is ready. Kueue fixes how many Pods a group has, and would
    remove the one that comes first."""
    if isinstance(owner, RLJob) and owner.spec.scheduling.gang == "kueue":
        return {"maxSurge": 0, "maxUnavailable": 1}
    return {"maxSurge": _MAX_SURGE, "maxUnavailable": 0}


def _add_images_env(template: Manifest) -> None:
    """To the server, which makes them a part of its version. Read from the merged template: it may name others, or
    take away what is asked for here, which the API server then refuses."""
    spec = template["spec"]
    scoring = [c for c in [*spec.get("initContainers", []), *spec["containers"]] if c["name"] in _SCORING]
    server = next(container for container in scoring if container["name"] == REWARD)
    images = " ".join(container.get("image") or "" for container in scoring)
    server["env"] = (server.get("env") or []) + pods.build_env({ENV_REWARD_IMAGES: images})


def _build_parts(service: RewardService, token: str, defaults: Defaults) -> pods.PodParts:
    reward = service.reward
    return pods.PodParts(
        role=REWARD,
        spec=reward,
        spec_path=service.path,
        image=defaults.reward_image,
        command=[
            *("python", "-m", "rljob_reward", "--config", f"{PATH_CONFIG}/{FILE_REWARD}"),
            *("--grace", str(math.ceil(reward.timeout_seconds))),
        ],
        labels=service.selector,
        config=pods.read_settings(reward, pods.POD_FIELDS | _READ_BY_DRIVER) | {"token": digest(token)},
        ports=_PORTS,
        env=pods.build_token_env(service.token_secret)
        + reward_vllm.build_server_env(reward)
        + _build_judge_env(service),
        probes=pods.build_probes("http", reward_vllm.STARTUP_SECONDS if reward.served_model else _STARTUP_SECONDS),
        volumes=[
            _build_config_volume(service),
            pods.Volume("scratch", {"emptyDir": {}}, PATH_SCRATCH),
            pods.Volume("tmp", {"emptyDir": {}}, "/tmp"),
            *reward_vllm.build_server_volumes(reward),
        ],
        sidecar=reward_vllm.build_sidecar(reward, defaults.trainer_image),
        grace_seconds=_PRE_STOP_SECONDS + math.ceil(reward.timeout_seconds) + _DRAIN_SECONDS,
        drain_seconds=_PRE_STOP_SECONDS,
        container_security={"readOnlyRootFilesystem": True},
    )


def _build_judge_env(service: RewardService) -> list[Manifest]:
    """An endpoint's key, and the Service over whose replicas its limits are shared."""
    endpoint = service.reward.judge.endpoint if service.reward.judge else None
    env: list[Manifest] = []
    if endpoint and endpoint.api_key_secret_ref:
        reference = {"secretKeyRef": endpoint.api_key_secret_ref.to_manifest()}
        env.append({"name": ENV_JUDGE_API_KEY, "valueFrom": reference})
    if endpoint and endpoint.limits != EndpointLimits():
        env += pods.build_env({ENV_PEERS: service.name})
    return env


def _build_config_volume(service: RewardService) -> pods.Volume:
    """reward.yaml, with function.py beside it: ours for an inline source, else from the user's own ConfigMap."""
    reference = service.reward.function.config_map_key_ref if service.reward.function else None
    if reference is None:
        return pods.Volume("config", {"configMap": {"name": service.name}}, PATH_CONFIG, read_only=True)
    theirs = {"name": reference.name, "items": [{"key": reference.key, "path": FILE_FUNCTION}]}
    sources = [{"configMap": {"name": service.name}}, {"configMap": theirs}]
    return pods.Volume("config", {"projected": {"sources": sources}}, PATH_CONFIG, read_only=True)
