"""The progress of one collection. Pure: the collection records facts, /status and the demand forecast read them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rljob_api.wire.protocol import Lane
from rljob_trainer.episodes.types import Episode


@dataclass
class CollectionProgress:
    """How far a collection is. Times are of the monotonic clock."""

    lane: Lane = "train"
    num_samples: int = 0
    group_size: int = 1
    started_at: float = 0.0
    ended_at: list[float] = field(default_factory=list)
    """[generated] When each episode ended, ascending."""
    episodes: list[Episode] = field(default_factory=list)
    """[generated] Ended ones, scored or not."""
    num_scored: int = 0
    scored_at: float = 0.0
    """When the last reward arrived."""
    latency_by_sample: dict[tuple[int, int], float] = field(default_factory=dict)
    """(group, sample) -> seconds from its episode's end to its last reward."""
    all_generated: asyncio.Event = field(default_factory=asyncio.Event)
    """Also set when a sample fails, because the rest may then never be generated."""
    failure: BaseException | None = None
    """Error of the first sample that failed."""

    @property
    def num_generated(self) -> int:
        return len(self.ended_at)

    @property
    def generate_seconds(self) -> float:
        return self.ended_at[-1] - self.started_at if self.ended_at else 0.0

    def record_ended(self, episode: Episode) -> None:
        self.ended_at.append(episode.ended_at)
        self.episodes.append(episode)
        if self.num_generated == self.num_samples:
            self.all_generated.set()

    def record_scored(self, episode: Episode, now: float) -> None:
        """Record that all rewards of an episode have arrived, perhaps for the second time."""
        self.num_scored += 1
        self.scored_at = now
        self.latency_by_sample[episode.group, episode.sample] = now - episode.ended_at

    def record_failure(self, task: asyncio.Task[Episode]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            self.all_generated.set()

    async def wait_until_generated(self) -> None:
        """Wait until the last episode has ended. Raise the error of a sample that failed."""
        await self.all_generated.wait()
        if self.failure is not None:
            raise self.failure
