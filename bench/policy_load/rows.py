"""Rows of an update, by the lengths that jobs have. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.episodes.types import NOT_SAMPLED, TrainRow

Lengths = Literal["fixed", "mixed", "groups"]
_LOG_DEVIATION = 0.8
"""Deviation of the log of an answer's length. The 99th percentile is 6 times the median."""


@dataclass(frozen=True)
class Load:
    lengths: Lengths
    """fixed: all rows have prompt_tokens + answer_tokens. mixed: answers have a long tail, up to answer_tokens.
    groups: the answers of fixed, and group_size rows share a prompt."""
    num_rows: int
    prompt_tokens: int
    answer_tokens: int
    group_size: int
    vocabulary: int
    seed: int = 0


def build_rows(load: Load) -> list[TrainRow]:
    generator = np.random.default_rng(load.seed)
    group = load.group_size if load.lengths == "groups" else 1
    prompts = generator.integers(0, load.vocabulary, (-(-load.num_rows // group), load.prompt_tokens))
    return [
        _row(prompts[i // group], generator.integers(0, load.vocabulary, length), generator)
        for i, length in enumerate(_answer_lengths(load, generator))
    ]


def _answer_lengths(load: Load, generator: np.random.Generator) -> NDArray[np.int64]:
    if load.lengths != "mixed":
        return np.full(load.num_rows, load.answer_tokens)
    median = load.answer_tokens / 6
    lengths = generator.lognormal(np.log(median), _LOG_DEVIATION, load.num_rows)
    return np.clip(lengths, 1, load.answer_tokens).astype(np.int64)


def _row(prompt: NDArray[np.int64], answer: NDArray[np.int64], generator: np.random.Generator) -> TrainRow:
    sampled = np.arange(len(prompt) + len(answer)) >= len(prompt)
    advantage = np.float32(generator.normal())
    return TrainRow(
        token_ids=np.concatenate([prompt, answer]),
        loss_mask=sampled,
        rollout_logprobs=np.where(sampled, -np.log(50_000), 0).astype(np.float32),
        advantages=np.where(sampled, advantage, 0).astype(np.float32),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
    )
