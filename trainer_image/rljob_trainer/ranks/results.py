"""The ranks' answers as the driver gets them. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rljob_api.wire.driver_status import TrainerChoices
from rljob_trainer.episodes.types import TokenFacts, TrainRow, UpdateMetrics
from rljob_trainer.policy.layout import Layout, MicroBatch
from rljob_trainer.policy.update_metrics import RankMetrics


class RankFacts(NamedTuple):
    """What the ranks have decided at their start, by the model and the devices."""

    layout: Layout
    """How rows may share micro-batches."""
    choices: TrainerChoices
    why_file: str
    """Why weights come to the rollouts through a file, although the devices are shared; else empty."""


@dataclass
class UpdateCounts:
    """Counts of the calls that make up an update."""

    num_tokens: int = 0
    num_micro_batches: int = 0
    """Micro-batches of each rank."""
    seconds: float = 0.0


def summarize_update(metrics: RankMetrics, update: UpdateCounts, denominator: float) -> UpdateMetrics:
    sums = defaultdict(float, metrics.sums)
    num_trained = sums["num_tokens"]

    def mean(name: str) -> float:
        return sums[name] / num_trained if num_trained else 0.0

    squared_importance = num_trained * sums["squared_importance"]
    return UpdateMetrics(
        loss=sums["loss"] / denominator if denominator else 0.0,
        policy_loss=sums["policy_loss"] / denominator if denominator else 0.0,
        kl=mean("kl"),
        entropy=mean("entropy"),
        grad_norm=metrics.grad_norm,
        learning_rate=metrics.learning_rate,
        clip_fraction=mean("clipped"),
        logprob_difference=mean("logprob_difference"),
        num_tokens=update.num_tokens,
        trained_share=num_trained / update.num_tokens if update.num_tokens else 0.0,
        num_micro_batches=update.num_micro_batches,
        seconds=update.seconds,
        mismatch_kl=mean("mismatch_kl"),
        mismatch_max=metrics.maxima.get("mismatch_max", 0.0),
        corrected_share=mean("corrected"),
        rejected_share=mean("rejected"),
        effective_sample_share=sums["importance"] ** 2 / squared_importance if squared_importance else 1.0,
        is_skipped=metrics.is_skipped,
        critic_loss=None if metrics.critic is None else metrics.critic.loss,
    )


RowFacts = dict[int, TokenFacts]
"""By index of the row in the call. Arrays are [sampled tokens of the row]."""


def split_facts(batches: Sequence[MicroBatch], facts: Sequence[TokenFacts]) -> RowFacts:
    """Return what a rank found out, by row.  facts  # [micro-batches]"""
    found: RowFacts = {}
    for batch, of_batch in zip(batches, facts, strict=True):
        bounds = np.searchsorted(batch.rows, np.arange(1, len(batch.row_indices)))
        arrays = {field.name: getattr(of_batch, field.name) for field in fields(TokenFacts)}
        parts = {name: np.split(values, bounds) for name, values in arrays.items() if values is not None}
        for number, index in enumerate(batch.row_indices.tolist()):
            if index >= 0:
                found[index] = TokenFacts(**{name: of_rows[number] for name, of_rows in parts.items()})
    return found


def scatter_facts(rows: Sequence[TrainRow], answers: Sequence[RowFacts]) -> list[TokenFacts]:
    """Put each rank's answers back to where their tokens are.  answers  # [ranks]"""
    facts = {index: of_row for answer in answers for index, of_row in answer.items()}
    found = {
        field.name: _scatter(rows, {index: getattr(of_row, field.name) for index, of_row in facts.items()})
        for field in fields(TokenFacts)
    }
    return [TokenFacts(**{name: values[i] for name, values in found.items()}) for i in range(len(rows))]


def _scatter(
    rows: Sequence[TrainRow], answers: Mapping[int, NDArray[np.float32] | None]
) -> list[NDArray[np.float32] | None]:
    """Return [tokens] of each row from the [sampled tokens] of those with an answer; None where nothing is known."""
    if any(values is None for values in answers.values()):
        return [None] * len(rows)
    scattered = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    for index, values in answers.items():
        scattered[index][rows[index].loss_mask] = values
    return [*scattered]
