"""The head of the baseline: rewards are asked for only after the last completion of the step, as one batch.

Everything else is the product's own. Used by bench/overlap.py as the head's command; not part of the trainer, since
nobody should want it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rljob_api.protocol import ScoreRequest
from rljob_api.reward import Reward
from rljob_trainer import collection, head
from rljob_trainer.agents import AgentLoop
from rljob_trainer.rewards import Rewards
from rljob_trainer.rollouts import Rollouts
from rljob_trainer.types import Scored


class LateRewards:
    """Rewards that wait until the whole collection is generated."""

    def __init__(self, rewards: Rewards, collector: collection.Collector) -> None:
        self._rewards, self._collector = rewards, collector

    async def score(self, request: ScoreRequest) -> dict[str, Scored]:
        await self._collector.progress.all_generated.wait()
        return await self._rewards.score(request)


class SynchronousCollector(collection.Collector):
    """A Collector whose samples wait for each other between generation and reward."""

    def __init__(self, agent: AgentLoop, rollouts: Rollouts, rewards: Rewards, specs: Sequence[Reward]) -> None:
        super().__init__(agent, rollouts, LateRewards(rewards, self), specs)  # type: ignore[arg-type]


if __name__ == "__main__":
    collection.Collector = SynchronousCollector  # type: ignore[misc]
    sys.exit(head.main())
