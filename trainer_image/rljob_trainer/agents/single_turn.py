"""One prompt, one completion."""

from __future__ import annotations

from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import Generate
from rljob_trainer.episodes.types import Episode, single_turn


class SingleTurn:
    async def run(self, prompt: Prompt, group: int, sample: int, generate: Generate) -> Episode:
        return single_turn(prompt, group, sample, await generate(prompt.token_ids))
