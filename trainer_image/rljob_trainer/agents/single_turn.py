"""One prompt, one completion."""

from rljob_trainer.agents.base import EpisodeTask, describe_length
from rljob_trainer.episodes.types import Episode, EpisodeEnd, PromptTooLongError, prompt_segment, single_turn


class SingleTurn:
    async def run(self, task: EpisodeTask) -> list[Episode]:
        prompt = task.prompt
        try:
            completion = await task.generate(prompt.token_ids)
        except PromptTooLongError as error:
            episode = Episode(prompt.index, task.group, task.sample, [prompt_segment(prompt)], end=EpisodeEnd.FAILED)
            episode.failure = describe_length(error)
            return [episode]
        return [single_turn(prompt, task.group, task.sample, completion)]
