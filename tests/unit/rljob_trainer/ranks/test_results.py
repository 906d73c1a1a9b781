"""What the driver gets from the ranks' answers."""

import numpy as np
import pytest

from rljob_trainer.episodes.types import NOT_SAMPLED, TokenFacts, TrainRow
from rljob_trainer.policy.update_metrics import RankMetrics
from rljob_trainer.ranks.results import UpdateCounts, scatter_facts, split_facts, summarize_update
from tests.support.micro_batches import plan_micro_batches


def row(token_ids: list[int], mask: list[int]) -> TrainRow:
    zeros, sampled = np.zeros(len(mask), np.float32), np.array(mask, np.bool_)
    versions = np.where(sampled, 0, NOT_SAMPLED).astype(np.int32)
    return TrainRow(np.array(token_ids), sampled, zeros, zeros, versions)


ROWS = [
    row([1, 2, 10, 11], [0, 0, 1, 1]),
    row([1, 2, 12, 13, 14], [0, 0, 1, 0, 1]),
    row([3, 4], [0, 0]),
    row([9, 15], [0, 1]),
]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_facts_are_scattered_to_their_tokens(num_ranks):
    plans = plan_micro_batches(ROWS, num_ranks=num_ranks, micro_batch_tokens=16)
    answers = [split_facts(plan, [TokenFacts(-batch.targets.astype(np.float32)) for batch in plan]) for plan in plans]
    facts = scatter_facts(ROWS, answers)
    found = [fact.reference_logprobs.tolist() for fact in facts]
    assert found == [[0, 0, -10, -11], [0, 0, -12, 0, -14], [0, 0], [0, -15]]
    assert [fact.values for fact in facts] == [None] * 4


SUMS = {
    "num_tokens": 4.0,
    "loss": 3.0,
    "policy_loss": 2.4,
    "kl": 2.0,
    "entropy": 8.0,
    "clipped": 1.0,
    "logprob_difference": 0.4,
    "mismatch_kl": 0.2,
    "corrected": 2.0,
    "rejected": 1.0,
    "importance": 4.0,
    "squared_importance": 8.0,
}


def test_update_means_are_over_the_trained_tokens():
    metrics = RankMetrics(SUMS, {"mismatch_max": 0.3}, 0.7, 1e-6, is_skipped=False)
    update = summarize_update(metrics, UpdateCounts(num_tokens=5, num_micro_batches=3, seconds=2.0), 6.0)
    assert (update.loss, update.policy_loss) == (0.5, pytest.approx(0.4))
    assert (update.kl, update.entropy, update.clip_fraction, update.corrected_share) == (0.5, 2.0, 0.25, 0.5)
    assert update.rejected_share == 0.25
    assert (update.logprob_difference, update.mismatch_kl) == (pytest.approx(0.1), pytest.approx(0.05))
    assert (update.mismatch_max, update.effective_sample_share) == (0.3, 0.5)
    assert (update.num_tokens, update.trained_share, update.num_micro_batches) == (5, 0.8, 3)


def test_update_without_trained_tokens_has_zeros():
    update = summarize_update(RankMetrics({}, {}, 0.0, 1e-6, is_skipped=False), UpdateCounts(num_tokens=5), 5.0)
    assert (update.loss, update.kl, update.num_tokens, update.trained_share) == (0, 0, 5, 0)
    assert update.effective_sample_share == 1
    empty = summarize_update(RankMetrics({}, {}, 0.0, 1e-6, is_skipped=False), UpdateCounts(), 0)
    assert (empty.loss, empty.num_tokens, empty.trained_share) == (0, 0, 0)
