"""Observed state of an RLJob: conditions, and fields derived from them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from rljob_api.manifest.base import Spec, list_map
from rljob_api.manifest.scaling import RewardScaling


class Condition(Spec):
    """Kubernetes' metav1.Condition."""

    type: str
    """Name of the condition, in CamelCase."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: str
    """Machine-readable reason, in CamelCase."""
    message: str = ""
    """Human-readable message: the cause and the remedy."""
    last_transition_time: datetime
    """Time of the last change of status."""
    observed_generation: int = 0
    """Generation of spec that this condition refers to."""


class RoleStatus(Spec):
    """Pods of one role."""

    name: str
    """head, trainer, rollout, or reward-NAME."""
    desired: int = 0
    """Desired Pods."""
    ready: int = 0
    """Ready Pods."""
    restarts: int = 0
    """Restarts so far."""


class RewardProblem(Spec):
    """Why samples have no valid score."""

    reward: str
    """Name of the reward."""
    reason: str
    """Reason of the invalid result, such as exception or timeout."""
    message: str = Field(default="", max_length=500)
    """Message of the first sample: for an exception its file, line, type and text."""
    step: int = 0
    """Step of the first sample. 0: an evaluation before the first step."""


class JobProgress(Spec):
    """The driver's last report. Advisory: it may be one poll old."""

    step: int = 0
    """Completed optimizer steps."""
    total_steps: int = 0
    """Steps of the whole job."""
    reward: float | None = None
    """Mean score of the last step's valid samples."""
    weight_version: int = 0
    """Version of the newest published weights."""
    phase: str = ""
    """Current phase: starting, evaluate, generate, score, update, publish, checkpoint, done."""
    waits_for: str = ""
    """What the driver is waiting for; empty if nothing."""
    problems: list[RewardProblem] = Field(default=[], max_length=8)
    """The first reasons for which samples have no valid score, each once."""


class RLJobStatus(Spec):
    """Observed state of an RLJob."""

    conditions: list[Condition] = Field(default=[], json_schema_extra=list_map("type"))
    """Queued, Suspended, Running, Restarting, Succeeded, Failed, PoolsIsolated, NameConflict, RewardVersionsMixed,
    Learning."""
    observed_generation: int = 0
    """Generation of spec that this status refers to."""
    phase: Literal["", "Pending", "Queued", "Suspended", "Running", "Restarting", "Succeeded", "Failed"] = ""
    """Derived from the conditions, for the printed column."""
    roles: list[RoleStatus] = Field(default=[], json_schema_extra=list_map("name"))
    """One entry per role."""
    rollouts: str = ""
    """Rollout replicas as READY/DESIRED, for the printed column."""
    rewards: str = ""
    """Reward Pods as READY/DESIRED, for the printed column."""
    scaling: list[RewardScaling] = Field(default=[], json_schema_extra=list_map("name"))
    """Last decision for each reward with autoscaling."""
    progress: JobProgress = Field(default=JobProgress())
    """The driver's last report."""
    retried: str = ""
    """Last processed value of the annotation rljob.dev/retry (`kubectl rljob retry`)."""
    queued_since: datetime | None = None
    """Start of the wait for a complete gang (scheduling.gang)."""
    not_before: datetime | None = None
    """Time of the next attempt to start a gang that released its nodes."""
    start_time: datetime | None = None
    """Time when the operator created the first Pod."""
    completion_time: datetime | None = None
    """Time when the job ended."""
