"""All rewards of the job, as one. `client` is one reward; `groups` decides which reward sees which samples together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import aiohttp

from rljob_api.manifest.reward import Reward
from rljob_api.wire.protocol import Lane, RewardDemand
from rljob_trainer.episodes.types import Episode
from rljob_trainer.rewards.client import RewardClient
from rljob_trainer.rewards.forecast import DemandForecast
from rljob_trainer.rewards.groups import GroupScorer


class RewardClients:
    def __init__(self, rewards: Sequence[Reward], session: aiohttp.ClientSession) -> None:
        self.clients = {reward.name: RewardClient(reward, session) for reward in rewards}

    async def start(self) -> None:
        for client in self.clients.values():
            await client.start()

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()

    def begin(self) -> None:
        for client in self.clients.values():
            client.begin()

    def open_group(self, group_id: str, lane: Lane, size: int, names: set[str] | None = None) -> GroupScorer:
        """Return a scorer for one group. `names`: the rewards that score it; None for all."""
        clients = {name: client for name, client in self.clients.items() if names is None or name in names}
        return GroupScorer(clients, group_id, lane, size)

    def find_stale(self, episodes: Iterable[Episode]) -> set[str]:
        """Return the rewards that scored any of `episodes` with another version than the pinned one."""
        return {
            name
            for episode in episodes
            for name, result in episode.results.items()
            if self.clients[name].is_stale(result)
        }

    def demand(self, forecast: DemandForecast) -> dict[str, RewardDemand]:
        return {name: client.demand(forecast) for name, client in self.clients.items()}

    def describe_wait(self, num_open: int, num_total: int) -> str:
        """Describe the wait for scores; empty if no request is in flight."""
        waits = [wait for client in self.clients.values() if (wait := client.describe_wait())]
        return f"waits for {num_open} of {num_total} rewards {'; '.join(waits)}" if waits else ""
