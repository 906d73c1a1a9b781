"""All rewards of the job, as one.

Owns that each collection is scored by one version of each reward, and what the rewards as a whole say of themselves.
Leaves one reward to `reward_client`, and who sees which samples together to `group_scoring`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import aiohttp

from rljob_api.manifest.reward import Reward
from rljob_api.wire.protocol import Lane, RewardDemand, ScoreRequest
from rljob_trainer.episodes.types import Scored, Trajectory
from rljob_trainer.rewards.client import RewardClient
from rljob_trainer.rewards.forecast import Outlook
from rljob_trainer.rewards.groups import GroupScorer


class Rewards:
    """All rewards of the job."""

    def __init__(
        self, rewards: Sequence[Reward], session: aiohttp.ClientSession, *, patience_seconds: float = 600.0
    ) -> None:
        self.clients = {
            reward.name: RewardClient(reward, session, patience_seconds=patience_seconds) for reward in rewards
        }

    async def start(self) -> None:
        for client in self.clients.values():
            await client.start()

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()

    def begin(self) -> None:
        """A collection begins: each reward scores all of it with one version."""
        for client in self.clients.values():
            client.begin()

    def open_group(self, group_id: str, lane: Lane, size: int, names: Collection[str] | None = None) -> GroupScorer:
        """For the samples of one group; `names`: the rewards that score it, by default all."""
        clients = {name: client for name, client in self.clients.items() if names is None or name in names}
        return GroupScorer(clients, group_id, lane, size)

    async def score(self, request: ScoreRequest) -> dict[str, Scored]:
        """Results of all rewards for a sample that is its own group."""
        return await self.open_group(request.id, request.lane, 1).score(0, request)

    def find_stale(self, trajectories: Iterable[Trajectory]) -> set[str]:
        """The rewards that scored any of `trajectories` with another version than the one that they are to use now."""
        return {
            name
            for trajectory in trajectories
            for name, result in trajectory.results.items()
            if self.clients[name].is_stale(result)
        }

    def demand(self, outlook: Outlook) -> dict[str, RewardDemand]:
        """What each reward is asked for in the collection under way, or in the next one."""
        return {name: client.demand(outlook) for name, client in self.clients.items()}

    def describe_wait(self, num_open: int, num_total: int) -> str:
        """In words, what scores are waited for; empty when none are under way."""
        waits = [wait for client in self.clients.values() if (wait := client.describe_wait())]
        return f"waits for {num_open} of {num_total} rewards {'; '.join(waits)}" if waits else ""
