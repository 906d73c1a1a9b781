"""The order of prompts, and its cursor."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.feed.prompt_feed import Cursor, EpochReader, epoch_order


def prompts_of(num_rows, left_out=()):
    return PromptSet(num_rows, {row: Prompt(row, "p", [1]) for row in range(num_rows) if row not in left_out})


def take(prompts, cursor, count, **settings):
    reader = EpochReader(prompts, cursor, **settings)
    return [reader.next_row()[0] for _ in range(count)], reader.cursor


@given(
    num_rows=st.integers(1, 30),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=10),
    seed=st.integers(0, 2**31),
    shuffle=st.booleans(),
)
def test_each_epoch_uses_every_row_once(num_rows, counts, seed, shuffle):
    cursor, taken = Cursor(), []
    for count in counts:  # each as after a resume
        rows, cursor = take(prompts_of(num_rows), cursor, count, seed=seed, shuffle=shuffle)
        taken += rows
    for epoch in range(len(taken) // num_rows):
        assert sorted(taken[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    assert cursor == Cursor(*divmod(sum(counts), num_rows)), "the cursor alone determines where to continue"


@given(
    num_rows=st.integers(2, 30),
    first=st.integers(1, 40),
    more=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_a_changed_limit_leaves_the_order_of_the_others(num_rows, first, more, seed, data):
    left_out = data.draw(st.sets(st.integers(0, num_rows - 1), max_size=num_rows - 1))
    _, cursor = take(prompts_of(num_rows), Cursor(), first, seed=seed, shuffle=True)
    resumed, _ = take(prompts_of(num_rows, left_out), cursor, more, seed=seed, shuffle=True)
    unchanged, _ = take(prompts_of(num_rows), cursor, num_rows * (more + 1), seed=seed, shuffle=True)
    assert resumed == [row for row in unchanged if row not in left_out][:more]


def test_order_depends_on_epoch_seed_and_source():
    cases = itertools.product((0, 1), (0, 1), (0, 1))
    orders = [tuple(epoch_order(50, epoch, seed=seed, shuffle=True, source=source)) for seed, epoch, source in cases]
    assert len(set(orders)) == 8
    assert orders[0] == tuple(epoch_order(50, 0, seed=0, shuffle=True))


def test_rows_that_are_not_due_are_passed_over_and_counted():
    reader = EpochReader(prompts_of(4, left_out={1}), Cursor(), seed=0, shuffle=False)
    found = [reader.next_row(lambda row, epoch: row == 3 or epoch == 1) for _ in range(3)]
    assert found == [(3, 2), (0, 0), (2, 0)], "what has no prompt is not counted"
