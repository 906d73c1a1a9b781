"""The progress of one collection. Pure: the collection records facts, /status and the demand forecast read them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rljob_api.wire.protocol import Lane
from rljob_trainer.episodes.types import Trajectory


@dataclass
class CollectionProgress:
    """How far a collection is. Times are of the monotonic clock."""

    lane: Lane = "train"
    num_samples: int = 0
    num_generated: int = 0
    num_scored: int = 0
    num_tokens: int = 0
    started_at: float = 0.0
    generated_at: float = 0.0
    """When the last trajectory ended."""
    ended_at: list[float] = field(default_factory=list)
    """[generated] When each trajectory ended."""
    scored_at: float = 0.0
    """When the last reward arrived."""
    latency_by_sample: dict[tuple[int, int], float] = field(default_factory=dict)
    """(group, sample) -> seconds from its trajectory's end to its last reward."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """Ended ones, scored or not."""
    all_generated: asyncio.Event = field(default_factory=asyncio.Event)
    """Also set when a sample fails, because the rest may then never be generated."""
    failure: BaseException | None = None
    """Error of the first sample that failed."""
    group_size: int = 1
    group_ended_at: list[float] = field(default_factory=list)
    """When the last trajectory of each group ended."""
    _num_open: dict[int, int] = field(default_factory=dict)
    """By group: trajectories that have not ended, once one has."""

    def record_ended(self, trajectory: Trajectory) -> None:
        """Record that a conversation has ended."""
        self.generated_at = trajectory.ended_at
        self.ended_at.append(trajectory.ended_at)
        self.num_generated += 1
        self.num_tokens += trajectory.num_sampled
        self.trajectories.append(trajectory)
        self._num_open[trajectory.group] = self._num_open.get(trajectory.group, self.group_size) - 1
        if not self._num_open[trajectory.group]:
            self.group_ended_at.append(trajectory.ended_at)
        if self.num_generated == self.num_samples:
            self.all_generated.set()

    def record_scored(self, trajectory: Trajectory, now: float) -> None:
        """Record that all rewards of a trajectory have arrived, perhaps for the second time."""
        self.num_scored += 1
        self.scored_at = now
        self.latency_by_sample[trajectory.group, trajectory.sample] = now - trajectory.ended_at

    def record_failure(self, task: asyncio.Task[Trajectory]) -> None:
        """Record the error of a sample's task that is done, if it has one."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            self.all_generated.set()

    async def wait_until_generated(self) -> None:
        """Wait until the last trajectory has ended. Raise the error of a sample that failed."""
        await self.all_generated.wait()
        if self.failure is not None:
            raise self.failure

    @property
    def latencies(self) -> list[float]:
        """[scored]"""
        return list(self.latency_by_sample.values())
