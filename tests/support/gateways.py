"""A real gateway before a policy whose answers are given, and whether it recorded them exactly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from rljob_api.manifest.agent import Agent
from rljob_api.wire.calls import ModelAccess
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask, Recording
from rljob_trainer.episodes.types import Completion
from rljob_trainer.gateway.server import ModelGateway
from tests.support.chat_templates import ENDS, build_template
from tests.support.episodes import listed


class SpelledPolicy:
    """Implements agents.base.Generate. It samples a text character by character, so that one which is encoded again has
    other tokens. Each token has its own log-prob, and each answer its own version."""

    def __init__(self, *texts: str, family: str = "qwen25") -> None:
        self.texts, self.family = list(texts), family
        self.prompts: list[list[int]] = []
        self.completions: list[Completion] = []
        self.stops: list[list[str]] = []
        self.may_answer = asyncio.Event()
        """Cleared: answers wait."""
        self.may_answer.set()

    async def __call__(
        self, token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        self.prompts.append(list(token_ids))
        self.stops.append(list(stop))
        text = self.texts.pop(0) if self.texts else None
        await self.may_answer.wait()
        if text is None:
            raise RuntimeError("there are no more answers")
        completion = self._spell(text, max_tokens)
        self.completions.append(completion)
        return completion

    def _spell(self, text: str, max_tokens: int | None) -> Completion:
        template = build_template(self.family)
        sampled = [token_id for character in text for token_id in template.encode(character)]
        sampled += template.encode(ENDS[self.family])
        is_cut = max_tokens is not None and len(sampled) > max_tokens
        sampled = sampled[:max_tokens] if is_cut else sampled
        logprobs = [-(index + 1) / 1024 for index in range(len(sampled))]
        versions = [len(self.completions)] * len(sampled)
        return Completion(sampled, logprobs, versions, template.decode(sampled) if is_cut else text, is_cut, "g")


@asynccontextmanager
async def running_gateway(
    family: str = "qwen25",
    context_length: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> AsyncIterator[ModelGateway]:
    """`options`: of the gateway. `fields`: further ones of spec.agent."""
    runner = {"function": {"inline": "def run(): pass"}}
    agent = Agent.model_validate({"type": "program", "runner": runner, **fields})
    gateway = ModelGateway(agent, build_template(family), context_length, **options)
    await gateway.start("127.0.0.1", 0)
    try:
        yield gateway
    finally:
        await gateway.close()


def make_task(policy: SpelledPolicy, id: str = "g/train/1/5/2") -> EpisodeTask:
    prompt = Prompt(7, [{"role": "user", "content": "2 + 2?"}], [1, 2], "4", "sums", {})
    return EpisodeTask(id, "train", prompt, 5, 2, policy)


def build_environment(access: ModelAccess) -> dict[str, str]:
    """Return the variables that a program has."""
    return {
        "OPENAI_BASE_URL": f"{access.url}/v1",
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": access.url,
        "ANTHROPIC_API_KEY": access.api_key,
    }


def check_exact(recording: Recording, policy: SpelledPolicy) -> None:
    """Assert that the turns are the completions of the policy, token by token, each after the prompt that it had."""
    assert len(recording.turns) == len(recording.completion_ids) == len(policy.completions)
    sampled = [turn for segment in listed(recording.segments) for turn in segment.turns if turn >= 0]
    assert sampled == [turn for turn, done in enumerate(policy.completions) for _ in done.token_ids], "order of turns"
    for segment in listed(recording.segments):
        for turn in sorted(set(segment.turns) - {-1}):
            places = [index for index, owner in enumerate(segment.turns) if owner == turn]
            completion, start, stop = policy.completions[turn], places[0], places[-1] + 1
            assert segment.token_ids[:start] == policy.prompts[turn], f"context of turn {turn}"
            assert segment.token_ids[start:stop] == completion.token_ids, f"tokens of turn {turn}"
            assert segment.logprobs[start:stop] == completion.logprobs
            assert segment.versions[start:stop] == completion.versions
        assert segment.loss_mask == [int(turn >= 0) for turn in segment.turns]
