"""The head of the baseline: rewards are asked for only after the last completion of the step, as one batch.

Everything else is the product's own. Used by bench/overlap.py as the head's command; not part of the trainer, since
nobody should want it.
"""

from __future__ import annotations

import sys

from rljob_api.protocol import ScoreRequest, ScoreResult
from rljob_trainer import collection, head
from rljob_trainer.rewards import Rewards


class LateRewards:
    """Rewards that wait until the whole collection is generated."""

    def __init__(self, rewards: Rewards, progress: collection.Progress) -> None:
        self._rewards, self._progress = rewards, progress

    async def score(self, request: ScoreRequest) -> dict[str, ScoreResult]:
        await self._progress.all_generated.wait()
        return await self._rewards.score(request)


class SynchronousCollector(collection.Collector):
    """A Collector whose samples wait for each other between generation and reward."""

    async def _sample(self, group, sample, plan, progress):  # type: ignore[no-untyped-def]
        streaming = self._rewards
        late = collection.Collector(self._agent, self._rollouts, LateRewards(streaming, progress), self._specs)  # type: ignore[arg-type]
        return await collection.Collector._sample(late, group, sample, plan, progress)


if __name__ == "__main__":
    collection.Collector = SynchronousCollector  # type: ignore[misc]
    sys.exit(head.main())
