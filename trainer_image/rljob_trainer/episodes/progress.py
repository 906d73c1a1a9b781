"""The progress of one collection or step. Pure: lanes record facts, /status and the demand forecast read them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rljob_api.wire.base import Lane
from rljob_trainer.episodes.types import Episode


@dataclass
class CollectionProgress:
    """How far an evaluation or a training step is. Times are of the monotonic clock.

    If groups start in earlier steps than they train in, a step counts what happens during it, whichever step the
    episodes belong to: in the long run as many episodes end as a step trains on.
    """

    lane: Lane = "train"
    num_samples: int = 0
    group_size: int = 1
    started_at: float = 0.0
    ended_at: list[float] = field(default_factory=list)
    """[generated] When each episode ended, ascending."""
    episodes: list[Episode] = field(default_factory=list)
    """Ended ones, scored or not: [generated], or more with seats: each trajectory is one."""
    num_scored: int = 0
    scored_at: float = 0.0
    """When the last reward arrived."""
    all_generated: asyncio.Event = field(default_factory=asyncio.Event)
    latency_by_sample: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """(group, sample, trajectory) -> seconds from its episode's end to its last reward."""

    @property
    def num_generated(self) -> int:
        return len(self.ended_at)

    @property
    def num_unscored(self) -> int:
        return max(0, self.num_samples - self.num_scored)

    @property
    def generate_seconds(self) -> float:
        return self.ended_at[-1] - self.started_at if self.ended_at else 0.0

    def record_ended(self, trajectories: Sequence[Episode]) -> None:
        """`trajectories`: of one episode."""
        self.ended_at.append(trajectories[0].ended_at)
        self.episodes += trajectories
        if self.num_generated == self.num_samples:
            self.all_generated.set()

    def record_scored(self, trajectories: Sequence[Episode], now: float) -> None:
        """Record that all rewards of an episode have arrived, perhaps for the second time. One that failed has none,
        nor has any of a job without spec.rewards."""
        self.num_scored += 1
        self.scored_at = now
        for each in trajectories:
            if each.results:
                self.latency_by_sample[each.group, each.sample, each.trajectory] = now - each.ended_at
