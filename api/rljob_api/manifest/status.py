"""Observed state: conditions (the truth) and what is derived from them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from rljob_api.manifest.base import Spec
from rljob_api.manifest.scaling import RewardScaling


class Condition(Spec):
    """Kubernetes' metav1.Condition."""

    type: str
    """Name of the condition, in CamelCase."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str
    """One CamelCase word for programs."""
    message: str = ""
    """A sentence for people: what is so, and what would change it."""
    last_transition_time: datetime
    """When status last changed."""
    observed_generation: int = 0
    """The generation of spec that this condition speaks of."""


class RoleStatus(Spec):
    """Pods of one role."""

    name: str
    """head, trainer, rollout, or reward-NAME."""
    desired: int = 0
    """Pods wanted."""
    ready: int = 0
    """Pods ready."""
    restarts: int = 0
    """Restarts so far."""


class Progress(Spec):
    """What the driver last said of itself. Advisory: it may be one poll old."""

    step: int = 0
    """Optimizer steps done."""
    total_steps: int = 0
    """Steps of the whole job."""
    reward: float | None = None
    """Mean score of the last step's valid samples."""
    weight_version: int = 0
    """Version of the newest published weights."""
    phase: str = ""
    """What the driver is doing: starting, evaluate, generate, score, update, publish, checkpoint, done."""
    waits_for: str = ""
    """In words, what it waits for; empty when nothing."""


class RLJobStatus(Spec):
    """Observed state of an RLJob."""

    conditions: list[Condition] = Field(
        default=[], json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """Queued, Suspended, Running, Restarting, Succeeded, Failed, PoolsIsolated, NameConflict, RewardVersionsMixed."""
    observed_generation: int = 0
    """The generation of spec that this status speaks of."""
    phase: Literal["", "Pending", "Queued", "Suspended", "Running", "Restarting", "Succeeded", "Failed"] = ""
    """Derived from the conditions, for the printed column."""
    roles: list[RoleStatus] = Field(
        default=[], json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    )
    """One entry a role."""
    rollouts: str = ""
    """Rollout replicas as READY/WANTED, for the printed column."""
    rewards: str = ""
    """Reward Pods as READY/WANTED, for the printed column."""
    scaling: list[RewardScaling] = Field(
        default=[], json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    )
    """The last decision for each reward with autoscaling."""
    progress: Progress = Field(default=Progress())
    """What the driver last said."""
    retried: str = ""
    """The value of the annotation rljob.dev/retry that was acted on last (`kubectl rljob retry`)."""
    queued_since: datetime | None = None
    """Since when the job waits to be whole (scheduling.gang)."""
    not_before: datetime | None = None
    """A job that gave its nodes back is not tried again before."""
    start_time: datetime | None = None
    """When the first Pod was asked for."""
    completion_time: datetime | None = None
    """When the job ended."""
