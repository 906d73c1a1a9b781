"""RewardModels: what one should have as children, what to say of it, and the order of the I/O.

Pure but for the token of a model that has none yet. Every child is called NAME-rewardmodel, which no child of a job
is called by default. A backend implements exactly these:

    get_reward_model(key: JobKey) -> RewardModel | None
    observe_reward_model(model: RewardModel) -> Observed      (children by LABEL_REWARD_MODEL; pods)
    apply(manifest: Manifest) -> None                         (as in Backend)
    delete(namespace: str, child: ChildKey) -> None           (as in Backend)
    update_reward_model_status(model: RewardModel, status: RewardModelStatus) -> None
    record_event(about: RewardModel, event: Event) -> None
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, cast

from rljob_api import API_VERSION
from rljob_api.contract import (
    ENV_POD_IP,
    ENV_TOKEN,
    FILE_FUNCTION,
    FILE_REWARD,
    LABEL_MANAGED_BY,
    LABEL_REWARD_MODEL,
    LABEL_ROLE,
    MANAGED_BY,
    PATH_CONFIG,
    PATH_SCRATCH,
    PORT_REWARD,
)
from rljob_api.job import RLJob
from rljob_api.reward import Reward, RewardModel, RewardModelStatus
from rljob_api.status import Condition
from rljob_operator.backend import ChildKey, Event, JobKey, Manifest, Observed, key_of
from rljob_operator.children import pods
from rljob_operator.children.common import HEAD, REWARD, digest, to_yaml
from rljob_operator.children.config import read_token
from rljob_operator.children.reward_refs import child_name
from rljob_operator.defaults import DEFAULTS, Defaults
from rljob_operator.difference import contains, stamp
from rljob_operator.plan import new_random_token

_STARTUP_SECONDS = 600
_DRAIN_SECONDS = 10
_PORTS = {"http": PORT_REWARD}
_NAME_IN_SERVER = "rewardmodel"
"""A reward's name has 15 characters at most, a RewardModel's more. The Pods' labels tell models apart."""


@dataclass(frozen=True)
class RewardModelPlan:
    """What should be, and what to say about it."""

    children: tuple[Manifest, ...]
    delete: tuple[ChildKey, ...]
    status: RewardModelStatus
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None


class RewardModelBackend(Protocol):
    """I/O of `reconcile_reward_model`. Every method may raise TransientError: try again later."""

    async def get_reward_model(self, key: JobKey) -> RewardModel | None: ...

    async def observe_reward_model(self, model: RewardModel) -> Observed: ...

    async def apply(self, manifest: Manifest) -> None: ...

    async def delete(self, namespace: str, child: ChildKey) -> None: ...

    async def update_reward_model_status(self, model: RewardModel, status: RewardModelStatus) -> None: ...

    async def record_event(self, about: RewardModel, event: Event) -> None: ...


def build_selector(name: str) -> dict[str, str]:
    return {LABEL_REWARD_MODEL: name, LABEL_ROLE: REWARD}


def plan_reward_model(
    model: RewardModel,
    observed: Observed,
    now: datetime,
    *,
    defaults: Defaults = DEFAULTS,
    new_token: Callable[[], str] = new_random_token,
) -> RewardModelPlan:
    """What should be now. Raises UserError for a template that cannot be merged."""
    children: list[Manifest] = []
    if model.spec.function is not None:
        secret = observed.children.get(ChildKey("Secret", child_name(model.metadata.name)))
        children = _build_children(model, (read_token(secret) if secret else None) or new_token(), defaults)
    extras = set(observed.children) - {key_of(child) for child in children}
    status = _build_status(model, observed, now.replace(microsecond=0))
    return RewardModelPlan(tuple(children), tuple(sorted(extras)), status, _derive_events(model.status, status))


async def reconcile_reward_model(
    backend: RewardModelBackend, key: JobKey, now: datetime, defaults: Defaults = DEFAULTS
) -> float | None:
    """Converge one RewardModel. UserError and TransientError go to the caller."""
    model = await backend.get_reward_model(key)
    if model is None:
        return None  # its children follow by their owner references
    observed = await backend.observe_reward_model(model)
    wanted = plan_reward_model(model, observed, now, defaults=defaults)
    for child in map(stamp, wanted.children):
        if not contains(observed.children.get(key_of(child)), child):
            await backend.apply(child)
    for extra in wanted.delete:
        await backend.delete(key.namespace, extra)
    if wanted.status != model.status:
        await backend.update_reward_model_status(model, wanted.status)
    for event in wanted.events:
        await backend.record_event(model, event)
    return wanted.requeue_after


def _build_children(model: RewardModel, token: str, defaults: Defaults) -> list[Manifest]:
    function = model.spec.function
    settings = Reward.model_validate({**model.spec.to_manifest(), "name": _NAME_IN_SERVER})
    data = {FILE_REWARD: to_yaml(settings.to_manifest())}
    if function and function.inline is not None:
        data[FILE_FUNCTION] = function.inline
    encoded = base64.b64encode(token.encode()).decode()
    pod_selector = {"matchLabels": build_selector(model.metadata.name)}
    heads = {"podSelector": {"matchLabels": {LABEL_ROLE: HEAD}}}
    ports = [{"name": "http", "port": PORT_REWARD, "targetPort": "http", "protocol": "TCP"}]
    return [
        _build(model, "v1", "Secret", type="Opaque", immutable=True, data={pods.TOKEN_KEY: encoded}),
        _build(model, "v1", "ConfigMap", data=data),
        _build(
            model, "v1", "Service", spec={"clusterIP": "None", "selector": pod_selector["matchLabels"], "ports": ports}
        ),
        _build(
            model,
            "networking.k8s.io/v1",
            "NetworkPolicy",
            spec={
                "podSelector": pod_selector,
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [heads], "ports": [{"protocol": "TCP", "port": PORT_REWARD}]}],
                "egress": [],
            },
        ),
        _build(model, "policy/v1", "PodDisruptionBudget", spec={"maxUnavailable": 1, "selector": pod_selector}),
        _build(
            model,
            "apps/v1",
            "Deployment",
            spec={
                "replicas": model.spec.replicas,
                "selector": pod_selector,
                # The template takes from its owner the uid alone, which a RewardModel has as a job does.
                "template": pods.build_pod_template(cast(RLJob, model), _build_parts(model, token, defaults)),
            },
        ),
    ]


def _build(model: RewardModel, version: str, kind: str, **rest: object) -> Manifest:
    name = model.metadata.name
    labels = build_selector(name) | {LABEL_MANAGED_BY: MANAGED_BY}
    metadata: Manifest = {"name": child_name(name), "namespace": model.metadata.namespace, "labels": labels}
    if model.metadata.uid:
        owner = {"apiVersion": API_VERSION, "kind": "RewardModel", "name": name, "uid": model.metadata.uid}
        metadata["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": True}]
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _build_parts(model: RewardModel, token: str, defaults: Defaults) -> pods.PodParts:
    name = child_name(model.metadata.name)
    secret = {"name": name, "key": pods.TOKEN_KEY}
    pod_ip = {"apiVersion": "v1", "fieldPath": "status.podIP"}
    sources: list[Manifest] = [{"configMap": {"name": name}}]
    reference = model.spec.function.config_map_key_ref if model.spec.function else None
    if reference:
        items = [{"key": reference.key, "path": FILE_FUNCTION}]
        sources.append({"configMap": {"name": reference.name, "items": items}})
    return pods.PodParts(
        role=REWARD,
        spec=model.spec,
        spec_path="spec",
        image=defaults.reward_image,
        command=["python", "-m", "rljob_reward", "--config", f"{PATH_CONFIG}/{FILE_REWARD}"],
        labels=build_selector(model.metadata.name),
        config=pods.read_settings(model.spec, pods.POD_FIELDS) | {"token": digest(token)},
        ports=_PORTS,
        env=[
            {"name": ENV_TOKEN, "valueFrom": {"secretKeyRef": secret}},
            {"name": ENV_POD_IP, "valueFrom": {"fieldRef": pod_ip}},
        ],
        probes=pods.build_probes("http", _STARTUP_SECONDS),
        volumes=[
            pods.Volume("config", {"projected": {"sources": sources}}, PATH_CONFIG, read_only=True),
            pods.Volume("scratch", {"emptyDir": {}}, PATH_SCRATCH),
            pods.Volume("tmp", {"emptyDir": {}}, "/tmp"),
        ],
        grace_seconds=math.ceil(model.spec.timeout_seconds) + _DRAIN_SECONDS,
        container_security={"readOnlyRootFilesystem": True},
    )


def _build_status(model: RewardModel, observed: Observed, now: datetime) -> RewardModelStatus:
    deployment = observed.children.get(ChildKey("Deployment", child_name(model.metadata.name)), {})
    seen = deployment.get("status", {})
    served = model.spec.function is not None
    replicas, ready = (seen.get("replicas", 0), seen.get("readyReplicas", 0)) if served else (0, 0)
    missing = served and ready < model.spec.replicas
    words = f"{ready} of {model.spec.replicas} Pods are ready"
    if not served:
        is_ready, reason, words = True, "External", "an endpoint of someone else"
    elif ready:
        is_ready, reason = True, "Serving"
    else:
        is_ready, reason = False, "WaitingForPods" if model.spec.replicas else "NoReplicas"
    return RewardModelStatus(
        conditions=[
            _build_condition(model, "Ready", is_ready, reason, words, now),
            _build_condition(model, "Degraded", missing, "TooFewReady" if missing else "AllReady", words, now),
        ],
        observed_generation=model.metadata.generation,
        replicas=replicas,
        ready_replicas=ready,
        selector=",".join(f"{k}={v}" for k, v in build_selector(model.metadata.name).items()) if served else "",
    )


def _build_condition(
    model: RewardModel, type_: str, holds: bool, reason: str, message: str, now: datetime
) -> Condition:
    status: Literal["True", "False"] = "True" if holds else "False"
    before = next((c for c in model.status.conditions if c.type == type_ and c.status == status), None)
    return Condition(
        type=type_,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=before.last_transition_time if before else now,
        observed_generation=model.metadata.generation,
    )


def _derive_events(old: RewardModelStatus, new: RewardModelStatus) -> tuple[Event, ...]:
    before = {condition.type for condition in old.conditions if condition.status == "True"}
    return tuple(
        Event("Warning" if condition.type == "Degraded" else "Normal", condition.reason, condition.message)
        for condition in new.conditions
        if condition.status == "True" and condition.type not in before
    )
