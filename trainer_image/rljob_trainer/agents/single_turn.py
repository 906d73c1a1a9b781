"""One prompt, one completion."""

from __future__ import annotations

from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.episodes.types import Episode, single_turn


class SingleTurn:
    async def run(self, task: EpisodeTask) -> Episode:
        prompt = task.prompt
        return single_turn(prompt, task.group, task.sample, await task.generate(prompt.token_ids))
