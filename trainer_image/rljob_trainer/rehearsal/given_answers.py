"""A policy whose answers are given: tokenized as the model would have sampled them, and then used up. Pure.

Invariant: an episode that asks for more answers than there are ends after the last given one, with all replies to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api.manifest.agent import Agent
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.episodes.types import Completion, Episode, EpisodeEnd

GENERATION = "given"
"""In place of the weights' generation."""


def find_end_id(template: ChatTemplate, tokenizer: Any) -> int | None:
    """Return the token with which the model would end an answer: the template's, which for some models is not the
    tokenizer's end-of-sequence token (Gemma 3, and base models with a template)."""
    return tokenizer.eos_token_id if template.end_token is None else template.end_token


def build_completion(
    text: str, template: ChatTemplate, end_id: int | None, max_tokens: int, stop: Sequence[str] = ()
) -> Completion:
    """Return the text as a completion. Like the model's, it ends with the end token, before a stop string whose tokens
    it has, or at the limit."""
    end = min((each for each in stop if each in text), key=text.index, default="")
    text = text[: text.index(end)] if end else text
    token_ids = [*template.encode(f"{text}{end}"), *([] if end or end_id is None else [end_id])]
    truncated = len(token_ids) > max_tokens
    if truncated:
        token_ids = token_ids[:max_tokens]
        text = template.decode(token_ids)
    count = len(token_ids)
    return Completion(token_ids, [0.0] * count, [0] * count, text, truncated, GENERATION)


@dataclass
class GivenAnswers:
    """Implements agents.base.Generate."""

    answers: Sequence[str]
    template: ChatTemplate
    end_id: int | None
    max_tokens: int
    stop: Sequence[str] = ()
    """The job's stop strings."""
    num_used: int = 0
    is_used_up: bool = False

    async def __call__(
        self, token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        if self.num_used == len(self.answers):
            # A cut-off answer ends the episode after everything that follows from the last given one.
            self.is_used_up = True
            return Completion([], [], [], "", True, GENERATION)
        text = self.answers[self.num_used]
        self.num_used += 1
        limit = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        return build_completion(text, self.template, self.end_id, limit, [*self.stop, *stop])


def limit_turns(agent: Agent, num_answers: int) -> Agent:
    """Return the agent with the limit at which the gateway refuses a program that continues after the empty answer."""
    if not agent.is_hosted:
        return agent
    return agent.model_copy(update={"max_assistant_turns": min(agent.turn_limit, num_answers + 1)})


def end_after_given_answers(episode: Episode) -> None:
    """Remove the empty answer that ended the episode. What the model would have seen before it stays.

    A program gets an answer without text, and after it none. If it fails then, the given answers are the cause and not
    the program: the episode counts as one that was ended.
    """
    if episode.turns and episode.turns[-1].truncated and not episode.turns[-1].text:
        episode.turns.pop()
        episode.messages = episode.messages[:-1]
    if episode.failure is not None and episode.failure.service == RUNNER_SERVICE:
        episode.failure = None
    if episode.failure is None:
        episode.end = EpisodeEnd.MAX_TURNS
