"""The layout of a mini-batch: every sampled token once, in rows that fit, with the weights of the whole mini-batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.episodes.types import TrainSample
from rljob_trainer.policy.micro_batches import MicroBatch, RankPlan, plan_micro_batches


def sample(prompt: list[int], completion: list[int], advantage: float = 1.0, mask: list[int] | None = None):
    mask = [0] * len(prompt) + (mask or [1] * len(completion))
    tokens = prompt + completion
    return TrainSample(tokens, mask, [-float(t) * m for t, m in zip(tokens, mask, strict=True)], advantage)


def all_batches(plans: list[RankPlan]) -> list[MicroBatch]:
    return [batch for plan in plans for batch in (*plan.forward_only, *plan.train)]


def trajectory_of(batch: MicroBatch, target: int) -> list[int]:
    """Return the tokens that a target's predicting token attends to, derived from the layout."""
    row, column = divmod(int(batch.sources[target]), batch.token_ids.shape[1])
    tree, branch = batch.trees[row, column], batch.branches[row, column]
    seen = [c for c in range(column + 1) if batch.trees[row, c] == tree and batch.branches[row, c] in (0, branch)]
    assert [batch.position_ids[row, c] for c in seen] == list(range(len(seen)))
    return [int(batch.token_ids[row, c]) for c in seen]


SAMPLES = st.lists(
    st.builds(
        sample,
        prompt=st.sampled_from([[1], [1, 2], [3, 4, 5], [9] * 7]),
        completion=st.lists(st.integers(1, 50), min_size=1, max_size=9),
        advantage=st.sampled_from([0.0, -1.0, 1.5]),
    ),
    min_size=1,
    max_size=24,
)


@given(SAMPLES, st.integers(1, 4), st.sampled_from([16, 40, 4096]), st.booleans(), st.booleans())
def test_every_sampled_token_is_computed_once_and_sees_its_trajectory(samples, num_ranks, limit, share, skip):
    plans = plan_micro_batches(
        samples, num_ranks=num_ranks, micro_batch_tokens=limit, share_prompts=share, skip_zero_advantages=skip
    )
    assert len({(len(plan.forward_only), len(plan.train)) for plan in plans}) == 1, "collectives must match"
    seen = set()
    for batch in all_batches(plans):
        for i, (owner, position) in enumerate(zip(batch.samples, batch.positions, strict=True)):
            if owner < 0:
                assert batch.weights[i] == 0
                continue
            of = samples[owner]
            assert trajectory_of(batch, i) == of.token_ids[:position]
            assert batch.targets[i] == of.token_ids[position]
            assert batch.rollout_logprobs[i] == of.rollout_logprobs[position]
            assert (owner, position) not in seen
            seen.add((owner, position))
        fits = batch.token_ids.size <= limit
        longest = max(len(s.token_ids) for s in samples)
        assert fits or (len(batch.token_ids) == 1 and batch.token_ids.size <= longest)
    assert seen == {(i, t) for i, s in enumerate(samples) for t, m in enumerate(s.loss_mask) if m}
    assert sum(batch.weights.sum() for batch in all_batches(plans)) == pytest.approx(1, abs=1e-5)


def test_shared_prompt_is_computed_once():
    prompt = list(range(1, 21))
    samples = [sample(prompt, [30 + k, 40 + k, 50 + k]) for k in range(4)]
    (plan,) = plan_micro_batches(samples, num_ranks=1, micro_batch_tokens=4096)
    (batch,) = plan.train
    # The last token of each completion predicts nothing, so it is not computed.
    assert batch.token_ids.shape == (1, 20 + 4 * 2)
    assert not batch.is_plain
    (unshared,) = plan_micro_batches(samples, num_ranks=1, micro_batch_tokens=4096, share_prompts=False)
    assert unshared.train[0].token_ids.shape == (4, 22)
    assert unshared.train[0].is_plain


def test_tool_output_between_sampled_tokens_is_seen_but_not_trained_on():
    mask = [1, 1, 0, 0, 1]
    (plan,) = plan_micro_batches([sample([1, 2], [10, 11, 12, 13, 14], mask=mask)], num_ranks=1, micro_batch_tokens=64)
    (batch,) = plan.train
    assert batch.positions.tolist() == [2, 3, 6]
    assert trajectory_of(batch, 2) == [1, 2, 10, 11, 12, 13]


def test_masked_samples_are_in_no_micro_batch():
    valid = [sample([1], [2, 3]), sample([1], [4])]
    masked = sample([1], [5, 6, 7], mask=[0, 0, 0])
    for level in ("token", "sequence"):
        with_masked = plan_micro_batches([*valid, masked], num_ranks=1, micro_batch_tokens=64, loss_level=level)
        without = plan_micro_batches(valid, num_ranks=1, micro_batch_tokens=64, loss_level=level)
        for ours, theirs in zip(all_batches(with_masked), all_batches(without), strict=True):
            for name in vars(ours):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_mini_batch_of_masked_samples_is_one_idle_backward_per_rank():
    plans = plan_micro_batches([sample([1], [5], mask=[0])], num_ranks=2, micro_batch_tokens=64)
    assert [len(plan.train) for plan in plans] == [1, 1]
    assert all((batch.weights == 0).all() and (batch.samples == -1).all() for batch in all_batches(plans))


def test_loss_level_weighs_trajectories_or_tokens_equally():
    samples = [sample([1], [2, 3, 4]), sample([9], [5])]
    (by_token,) = plan_micro_batches(samples, num_ranks=1, micro_batch_tokens=64)
    assert by_token.train[0].weights.tolist() == pytest.approx([0.25] * 4)
    (by_sequence,) = plan_micro_batches(samples, num_ranks=1, micro_batch_tokens=64, loss_level="sequence")
    batch = by_sequence.train[0]
    tokens = zip(batch.samples.tolist(), batch.positions.tolist(), strict=True)
    weights = dict(zip(tokens, batch.weights.tolist(), strict=True))
    assert weights == pytest.approx({(0, 1): 1 / 6, (0, 2): 1 / 6, (0, 3): 1 / 6, (1, 1): 0.5})


def test_samples_without_advantage_get_no_backward():
    samples = [sample([1], [2, 3], advantage=0.0), sample([1], [4, 5], advantage=1.0)]
    (plan,) = plan_micro_batches(samples, num_ranks=1, micro_batch_tokens=64, skip_zero_advantages=True)
    assert {*plan.forward_only[0].samples} == {0}
    assert {*plan.train[0].samples} == {1}
    assert plan.train[0].weights.tolist() == pytest.approx([0.25, 0.25]), "the others still count in the mean"


def test_ranks_get_similar_numbers_of_tokens():
    samples = [sample([p, p + 1, p + 2], [7] * (1 + p % 12)) for p in range(64) for _ in range(4)]
    plans = plan_micro_batches(samples, num_ranks=4, micro_batch_tokens=512)
    loads = [sum(int((b.trees >= 0).sum()) for b in plan.train) for plan in plans]
    assert max(loads) < 1.1 * min(loads)


def test_trajectory_without_prompt_is_rejected():
    with pytest.raises(ValueError, match="at least one prompt token"):
        plan_micro_batches([sample([], [1, 2])], num_ranks=1, micro_batch_tokens=64)
