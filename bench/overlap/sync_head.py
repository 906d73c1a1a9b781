"""The head of the baseline: it requests all rewards of a step as one batch, after the last completion.

Everything else is the product's code. bench/overlap.py runs it as the head's command. It is not part of the trainer,
because it is slower.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rljob_api.manifest.reward import Reward
from rljob_api.wire.protocol import ScoreRequest
from rljob_trainer.agents import AgentLoop
from rljob_trainer.driver import collection
from rljob_trainer.episodes.types import ScoredResult
from rljob_trainer.head import main as head
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.clients import RewardClients
from rljob_trainer.rewards.groups import GroupScorer


class DeferredScorer:
    """A group's scorer that first waits until the whole collection is generated."""

    def __init__(self, scorer: GroupScorer, collector: collection.Collector) -> None:
        self._scorer, self._collector = scorer, collector

    async def score(
        self, position: int, request: ScoreRequest, ended_at: float | None = None
    ) -> dict[str, ScoredResult]:
        await self._collector.progress.wait_until_generated()
        return await self._scorer.score(position, request, ended_at)


class DeferredRewards:
    """Rewards whose scorers wait; otherwise a proxy."""

    def __init__(self, rewards: RewardClients, collector: collection.Collector) -> None:
        self._rewards, self._collector = rewards, collector

    def open_group(self, *arguments: Any) -> DeferredScorer:
        return DeferredScorer(self._rewards.open_group(*arguments), self._collector)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rewards, name)


class SynchronousCollector(collection.Collector):
    """A Collector whose samples wait for each other between generation and reward."""

    def __init__(
        self, agent: AgentLoop, rollouts: RolloutClient, rewards: RewardClients, specs: Sequence[Reward]
    ) -> None:
        super().__init__(agent, rollouts, DeferredRewards(rewards, self), specs)  # type: ignore[arg-type]


if __name__ == "__main__":
    collection.Collector = SynchronousCollector  # type: ignore[misc]
    sys.exit(head.main())
