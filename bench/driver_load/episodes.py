"""The scored groups of a step, built as agent loops build them: from completions, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rljob_api.manifest.job import RLJob
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import (
    Completion,
    Episode,
    EpisodeEnd,
    Group,
    ScoredResult,
    Segment,
    Turn,
    empty_segment,
)

_PROMPT_SHARE, _CONTEXT_SHARE = 0.1, 0.05
_VOCABULARY = 150_000


@dataclass(frozen=True)
class Shape:
    episodes: int
    tokens: int
    """Length of an episode: a prompt, an answer, a result, and another answer."""
    group_size: int

    @property
    def groups(self) -> int:
        return self.episodes // self.group_size


def build_job(shape: Shape) -> RLJob:
    return RLJob.model_validate(
        {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "bench"},
            "spec": {
                "model": {"source": "m"},
                "data": {"train": {"source": "d"}},
                "rewards": [{"name": "exact", "function": {"file": "reward.py"}}],
                "algorithm": {"groupSize": shape.group_size},
                "rollout": {"sampling": {"maxTokens": shape.tokens}},
                "schedule": {"steps": 8, "promptsPerStep": shape.groups},
                "trainer": {"replicas": min(64, shape.groups), "microBatchTokens": max(4096, 4 * shape.tokens)},
            },
        }
    )


def build_groups(shape: Shape, seed: int = 0) -> list[Group]:
    generator = np.random.default_rng(seed)
    words = [f" w{i}" for i in range(1000)]
    return [_build_group(index, shape, generator, words) for index in range(shape.groups)]


def _build_group(index: int, shape: Shape, generator: np.random.Generator, words: list[str]) -> Group:
    num_prompt, num_context = int(shape.tokens * _PROMPT_SHARE), int(shape.tokens * _CONTEXT_SHARE)
    rest = shape.tokens - num_prompt - num_context
    prompt = Prompt(index, "a question", _ids(generator, num_prompt), "42", "bench")
    group = Group(index, prompt)
    for sample in range(shape.group_size):
        segment = empty_segment()
        segment.append_context(prompt.token_ids)
        answers = [_complete(generator, count, words) for count in (rest // 2, rest - rest // 2)]
        segment.append_sampled(answers[0], 0)
        segment.append_context(_ids(generator, num_context))
        segment.append_sampled(answers[1], 1)
        group.episodes.append(_describe(group, sample, segment, answers, float(generator.integers(0, 2))))
    return group


def _describe(group: Group, sample: int, segment: Segment, answers: list[Completion], score: float) -> Episode:
    messages = [{"role": "user", "content": "a question"}]
    messages += [{"role": "assistant", "content": answer.text} for answer in answers]
    return Episode(
        group.prompt.index,
        group.index,
        sample,
        [segment],
        [Turn(answer.text) for answer in answers],
        "g",
        results={"exact": ScoredResult(id="", valid=True, score=score, latency_seconds=0.1)},
        score=score,
        messages=messages,
        end=EpisodeEnd.USER,
    )


def _ids(generator: np.random.Generator, count: int) -> list[int]:
    ids: list[int] = generator.integers(0, _VOCABULARY, count).tolist()
    return ids


def _complete(generator: np.random.Generator, count: int, words: list[str]) -> Completion:
    logprobs = -generator.exponential(1.0, count).astype(np.float32)
    text = "".join([words[i] for i in generator.integers(0, len(words), count // 4)])
    return Completion(_ids(generator, count), logprobs.tolist(), [3] * count, text, False, "g")
