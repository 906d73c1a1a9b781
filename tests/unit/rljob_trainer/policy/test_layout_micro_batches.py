"""The layout of an update: every sampled token once, in lines that fit, and each row as a whole."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.episodes.types import NOT_SAMPLED, TrainRow, UpdateVersions
from rljob_trainer.policy.layout import MASKED_TREES, PACKED_ROWS, PACKED_TREES, PLAIN, MicroBatch, RankPlan
from tests.support.micro_batches import plan_micro_batches


def row(
    prompt: list[int],
    completion: list[int],
    advantage: float = 1.0,
    mask: list[int] | None = None,
    weight: float = 1.0,
    version: int = 0,
) -> TrainRow:
    sampled = np.array([0] * len(prompt) + (mask or [1] * len(completion)), np.bool_)
    token_ids = np.array(prompt + completion, np.int64)
    return TrainRow(
        token_ids=token_ids,
        loss_mask=sampled,
        rollout_logprobs=(-token_ids * sampled).astype(np.float32),
        advantages=(advantage * sampled).astype(np.float32),
        versions=np.where(sampled, version, NOT_SAMPLED).astype(np.int32),
        weight=weight,
        temperature=weight + 0.5,
    )


def all_batches(plans: list[RankPlan]) -> list[MicroBatch]:
    return [batch for plan in plans for batch in plan]


def owners(batch: MicroBatch) -> list[int]:
    """Return the row of each target."""
    return batch.row_indices[batch.rows].tolist()


def trajectory_of(batch: MicroBatch, target: int) -> list[int]:
    """Return the tokens that a target's predicting token attends to, derived from the layout."""
    line, column = divmod(int(batch.sources[target]), batch.token_ids.shape[1])
    tree, branch = batch.trees[line, column], batch.branches[line, column]
    seen = [c for c in range(column + 1) if batch.trees[line, c] == tree and batch.branches[line, c] in (0, branch)]
    assert [batch.position_ids[line, c] for c in seen] == list(range(len(seen)))
    return [int(batch.token_ids[line, c]) for c in seen]


ROWS = st.lists(
    st.builds(
        row,
        prompt=st.sampled_from([[1], [1, 2], [3, 4, 5], [9] * 7]),
        completion=st.lists(st.integers(1, 50), min_size=1, max_size=9),
        advantage=st.sampled_from([0.0, -1.0, 1.5]),
        weight=st.sampled_from([1.0, 0.25]),
        version=st.integers(1, 4),
    ),
    min_size=1,
    max_size=24,
)


LAYOUTS = [PLAIN, MASKED_TREES, PACKED_ROWS, PACKED_TREES]


@given(ROWS, st.integers(1, 4), st.sampled_from([16, 40, 4096]), st.sampled_from(LAYOUTS), st.booleans())
def test_every_sampled_token_is_computed_once_and_sees_its_row(rows, num_ranks, limit, layout, needs_all):
    plans = plan_micro_batches(
        rows,
        num_ranks=num_ranks,
        micro_batch_tokens=limit,
        layout=layout,
        without_advantage=needs_all,
        versions=UpdateVersions(4, 4, 5),
    )
    assert len({len(plan) for plan in plans}) == 1, "collectives must match"
    seen: set[tuple[int, int]] = set()
    complete: set[int] = set()
    for batch in all_batches(plans):
        for i, (owner, position) in enumerate(zip(owners(batch), batch.positions.tolist(), strict=True)):
            if owner < 0:
                assert batch.weights[i] == 0
                continue
            of = rows[owner]
            assert trajectory_of(batch, i) == of.token_ids[:position].tolist()
            assert batch.targets[i] == of.token_ids[position]
            assert batch.rollout_logprobs[i] == of.rollout_logprobs[position]
            assert batch.advantages[i] == of.advantages[position]
            assert (batch.weights[i], batch.temperatures[i]) == (of.weight, of.temperature)
            assert (owner, position) not in seen
            seen.add((owner, position))
        here = set(owners(batch)) - {-1}
        assert not here & complete, "a row is in one micro-batch"
        complete |= here
        if layout in (PACKED_ROWS, PACKED_TREES):
            assert len(batch.token_ids) == 1
            assert (batch.trees >= 0).all(), "nothing is padded"
        fits = batch.token_ids.size <= limit
        longest = max(len(each.token_ids) for each in rows)
        assert fits or (len(batch.token_ids) == 1 and batch.token_ids.size <= longest)
    chosen = [(i, each) for i, each in enumerate(rows) if needs_all or each.advantages.any()]
    assert seen == {(i, t) for i, each in chosen for t in np.flatnonzero(each.loss_mask)}


def test_shared_prompt_is_computed_once():
    prompt = list(range(1, 21))
    rows = [row(prompt, [30 + k, 40 + k, 50 + k]) for k in range(4)]
    ((batch,),) = plan_micro_batches(rows, num_ranks=1, micro_batch_tokens=4096)
    # The last token of each completion predicts nothing, so it is not computed.
    assert batch.token_ids.shape == (1, 20 + 4 * 2)
    assert not batch.is_plain
    ((unshared,),) = plan_micro_batches(rows, num_ranks=1, micro_batch_tokens=4096, layout=PLAIN)
    assert unshared.token_ids.shape == (4, 22)
    assert unshared.is_plain


def test_tool_output_between_sampled_tokens_is_seen_but_not_trained_on():
    mask = [1, 1, 0, 0, 1]
    ((batch,),) = plan_micro_batches([row([1, 2], [10, 11, 12, 13, 14], mask=mask)], num_ranks=1, micro_batch_tokens=64)
    assert batch.positions.tolist() == [2, 3, 6]
    assert trajectory_of(batch, 2) == [1, 2, 10, 11, 12, 13]


def test_masked_rows_are_in_no_micro_batch():
    valid = [row([1], [2, 3]), row([1], [4])]
    masked = row([1], [5, 6, 7], mask=[0, 0, 0])
    with_masked = plan_micro_batches([*valid, masked], num_ranks=1, micro_batch_tokens=64)
    without = plan_micro_batches(valid, num_ranks=1, micro_batch_tokens=64)
    for ours, theirs in zip(all_batches(with_masked), all_batches(without), strict=True):
        for name in vars(ours):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_rows_that_are_all_masked_need_no_micro_batch():
    assert plan_micro_batches([row([1], [5], mask=[0])], num_ranks=2, micro_batch_tokens=64) == [[], []]


def test_group_with_fewer_rows_than_ranks_gets_idle_micro_batches():
    rows = [dataclasses.replace(row([1], [5]), returns=np.zeros(2, np.float32), values=np.ones(2, np.float32))]
    (one, *idle) = plan_micro_batches(rows, num_ranks=3, micro_batch_tokens=64)
    assert [owners(batch) for batch in one] == [[0]]
    for (batch,) in idle:
        assert (owners(batch), batch.weights.tolist()) == ([-1], [0])
        assert batch.returns is not None, "the critic takes part"
        assert batch.values is not None
        assert batch.reference_logprobs is None, "as in the others"


def test_rows_without_advantage_are_left_out_unless_another_term_needs_them():
    rows = [row([1], [2, 3], advantage=0.0), row([1], [4, 5], advantage=1.0)]
    found = {}
    for needs_all in (False, True):
        ((batch,),) = plan_micro_batches(rows, num_ranks=1, micro_batch_tokens=64, without_advantage=needs_all)
        found[needs_all] = set(owners(batch))
    assert found == {False: {1}, True: {0, 1}}
    with_critic = [dataclasses.replace(each, returns=np.zeros(3, np.float32)) for each in rows]
    ((batch,),) = plan_micro_batches(with_critic, num_ranks=1, micro_batch_tokens=64, without_advantage=False)
    assert set(owners(batch)) == {0, 1}


def test_proximal_share_follows_from_each_tokens_version():
    rows = [row([1], [2], version=version) for version in (2, 3)]
    ((batch,),) = plan_micro_batches(rows, num_ranks=1, micro_batch_tokens=64, versions=UpdateVersions(3, 3.5, 4))
    shares = dict(zip(owners(batch), batch.proximal_shares.tolist(), strict=True))
    assert shares == pytest.approx({0: 1 / 2, 1: 0})


def test_two_segments_of_an_episode_are_separate_rows():
    """The second one is not a continuation of the first, even where its context begins like it."""
    rows = [row([1, 2], [3, 4]), row([1, 2, 3], [5])]
    ((batch,),) = plan_micro_batches(rows, num_ranks=1, micro_batch_tokens=64)
    assert {tuple(trajectory_of(batch, i)) for i in range(3)} == {(1, 2), (1, 2, 3)}
    assert len(batch.row_indices) == 2


def test_ranks_get_similar_numbers_of_tokens():
    rows = [row([p, p + 1, p + 2], [7] * (1 + p % 12)) for p in range(64) for _ in range(4)]
    plans = plan_micro_batches(rows, num_ranks=4, micro_batch_tokens=512)
    loads = [sum(int((batch.trees >= 0).sum()) for batch in plan) for plan in plans]
    assert max(loads) < 1.1 * min(loads)


def test_row_without_prompt_is_rejected():
    with pytest.raises(ValueError, match="at least one prompt token"):
        plan_micro_batches([row([], [1, 2])], num_ranks=1, micro_batch_tokens=64)
