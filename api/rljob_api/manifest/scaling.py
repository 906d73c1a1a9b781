"""Autoscaling of a reward: what the user chooses, and what a status says of the last decision.

Leaves the arithmetic to the operator's `autoscale`. Invariant: the status holds all that the next decision needs of the
last one, so that a new operator goes on where the old one stopped.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from pydantic import Field

from rljob_api.manifest.base import Rule, Spec


class Autoscaling(Spec):
    """Replicas by demand: slots = samples x seconds of one / time in which they shall be scored."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("maxReplicas", "minReplicas"),
            "must be at least minReplicas",
            "raise it, or lower minReplicas",
            lambda scaling: scaling.max_replicas >= scaling.min_replicas,
            # has(): rules see an object before its own defaults are filled in.
            "self.maxReplicas >= (has(self.minReplicas) ? self.minReplicas : 1)",
        ),
    )

    min_replicas: int = Field(default=1, ge=0, le=4096)
    """Fewest Pods. 0 keeps none while nothing is to be scored; a request that comes before the first Pod waits."""
    max_replicas: int = Field(ge=1, le=4096)
    """Most Pods."""
    target_seconds: float | None = Field(default=None, gt=0)
    """Seconds from a step's begin in which all of its samples shall be scored. Null: the time that the GPUs need anyway
    before they want the last scores, as the driver measures it."""
    scale_down_after_seconds: float = Field(default=300, ge=0)
    """Seconds for which fewer must have been enough before Pods go. They never go inside a step. Longer than the pause
    between two steps' scores, it keeps them from step to step."""
    spare_replicas: int = Field(default=0, ge=0, le=4096)
    """Pods beyond what demand asks for, while there is any: they take over at once from one that dies."""
    utilization: float = Field(default=0.8, gt=0, le=1)
    """Share of the target that the slots may be busy; the rest is for uneven arrival and latency."""


class RewardScaling(Spec):
    """The last decision on a reward's replicas. Inputs are those at the time when the replicas changed."""

    name: str
    """Name of the reward."""
    replicas: int = 0
    """Pods decided on."""
    slots: int = 0
    """Slots that demand asked for."""
    samples: int = 0
    """Samples to score in a step, of all jobs together."""
    latency_seconds: float | None = None
    """Mean execution time of one sample."""
    target_seconds: float | None = None
    """Time in which a step's samples shall be scored."""
    message: str = ""
    """The arithmetic in words: why so many."""
    last_scale_time: datetime | None = None
    """When replicas last changed."""
    below_since: datetime | None = None
    """Since when fewer have been enough; null while they have not."""
    below_peak: int = 0
    """Most Pods asked for since belowSince: what is kept when the others go."""
