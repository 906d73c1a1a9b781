"""One prompt, one completion."""

from __future__ import annotations

from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import Generate
from rljob_trainer.episodes.types import Trajectory


class SingleTurn:
    async def run(self, prompt: Prompt, group: int, sample: int, generate: Generate) -> Trajectory:
        completion = await generate(prompt.token_ids)
        num_prompt = len(prompt.token_ids)
        return Trajectory(
            prompt_index=prompt.index,
            group=group,
            sample=sample,
            token_ids=[*prompt.token_ids, *completion.token_ids],
            loss_mask=[0] * num_prompt + [1] * len(completion.token_ids),
            logprobs=[0.0] * num_prompt + completion.logprobs,
            text=completion.text,
            truncated=completion.truncated,
            weight_key=completion.weight_key,
        )
