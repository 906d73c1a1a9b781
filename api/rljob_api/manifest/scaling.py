"""Autoscaling of a reward or a service of the agent: the user's settings, and the last decision in the status.

The operator's `autoscale` makes the decisions. Invariant: the status holds everything that the next decision needs from
the last one, so that a restarted operator continues from it.
"""

from datetime import datetime
from typing import ClassVar

from pydantic import Field

from rljob_api.manifest.base import Rule, Spec


class Autoscaling(Spec):
    """Scale replicas with demand: slots = samples x seconds per sample / target time. For agents, samples are episodes,
    and a runner has a slot for each episode in flight."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("maxReplicas", "minReplicas"),
            "must be at least minReplicas",
            "raise it, or lower minReplicas",
            lambda scaling: scaling.max_replicas >= scaling.min_replicas,
            # has(): the API server evaluates rules before it fills in an object's own defaults.
            "self.maxReplicas >= (has(self.minReplicas) ? self.minReplicas : 1)",
        ),
    )

    min_replicas: int = Field(default=1, ge=0, le=4096)
    """Minimum number of Pods. With 0, all Pods are removed while there is no demand; requests wait for the first
    Pod."""
    max_replicas: int = Field(ge=1, le=4096)
    """Maximum number of Pods."""
    target_seconds: int | None = Field(default=None, ge=1)
    """Target time to score all samples of a step, in seconds from its start. Null: measured by the driver as the time
    until the GPUs need the last scores; for a user or tool, until the last episode ends. For a runner, the time in
    which it may play all episodes of a step; null: all of them at once."""
    scale_down_after_seconds: int = Field(default=300, ge=0)
    """Seconds for which demand must stay lower before Pods are removed. Pods are never removed during a step. To keep
    Pods between steps, set it longer than the pause between their scores."""
    spare_replicas: int = Field(default=0, ge=0, le=4096)
    """Extra Pods while there is demand, to replace a failed Pod immediately."""
    utilization: float = Field(default=0.8, gt=0, le=1)
    """Target fraction of time that slots are busy. The rest is headroom for uneven arrival and latency."""


class RewardScaling(Spec):
    """The last decision on the replicas of a reward or a service of the agent, with its inputs at the time when they
    changed."""

    name: str
    """Name of the reward or the tool; user, runner."""
    replicas: int = 0
    """Number of Pods chosen."""
    slots: int = 0
    """Slots that the demand requires."""
    samples: int = 0
    """Samples to score per step, over all jobs; episodes of an agent."""
    latency_seconds: float | None = None
    """Mean execution time of one sample; of an agent, of all calls of an episode."""
    target_seconds: float | None = None
    """Target time to score all samples of a step, in seconds."""
    message: str = ""
    """Human-readable reason for the number of Pods."""
    last_scale_time: datetime | None = None
    """Time of the last change of replicas."""
    below_since: datetime | None = None
    """Start of the current period of lower demand. Null: demand needs all replicas."""
    below_peak: int = 0
    """Peak number of Pods required since belowSince, which a scale-down keeps."""
