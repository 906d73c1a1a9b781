"""Which prompts are due: by the streak of groups that succeeded or failed as a whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.job_sections import Curriculum
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group
from rljob_trainer.feed.prompt_feed import SuccessHistory, judge_group, unpack
from tests.support.episodes import episode

LIMITS = Curriculum(easy_epochs=8, hard_epochs=3)


def group_of(*scores):
    return Group(0, Prompt(0, "p", [1]), [episode(index=(0, 0, i), score=score) for i, score in enumerate(scores)])


@pytest.mark.parametrize(
    ("scores", "result"),
    [
        ((1.0, 0.5), 1),
        ((0.0, -1.0), -1),
        ((0.0, 0.5), 0),
        ((1.0, None), 1),
        ((None, 0.4), -1),
        ((None, None), None),
    ],
)
def test_a_group_counts_by_its_valid_samples_alone(scores, result):
    assert judge_group(group_of(*scores), success=0.5) == result


@pytest.mark.parametrize(
    ("results", "interval"),
    [
        ([], 1),
        ([0], 1),
        ([1], 2),
        ([1, 1, 1], 8),
        ([1] * 20, 8),
        ([-1], 2),
        ([-1] * 20, 2),
        ([1, 1, 0], 1),
        ([1, 1, 1, -1], 2),
        ([-1, -1, 1, 1], 4),
    ],
)
def test_interval_doubles_with_each_group_up_to_the_limit(results, interval):
    history = SuccessHistory(3, LIMITS, seed=0)
    for result in results:
        history.record(1, result)
    assert (history.interval(0), history.interval(1)) == (1, interval)


@given(results=st.lists(st.sampled_from([-1, 0, 1]), max_size=12), seed=st.integers(0, 2**63), first=st.integers(0, 99))
def test_a_row_is_due_exactly_once_in_each_interval(results, seed, first):
    history = SuccessHistory(5, LIMITS, seed=seed, source=2)
    for result in results:
        history.record(3, result)
    interval = history.interval(3)
    assert sum(history.is_due(3, epoch) for epoch in range(first, first + interval)) == 1
    assert all(history.is_due(2, epoch) for epoch in range(first, first + 3)), "another row is not concerned"


def test_rows_of_one_streak_spread_over_the_epochs():
    history = SuccessHistory(800, LIMITS, seed=0)
    for row in range(800):
        for _ in range(3):
            history.record(row, 1)
    due = [sum(history.is_due(row, epoch) for row in range(800)) for epoch in range(8)]
    assert sum(due) == 800
    assert all(50 < number < 150 for number in due), due


def test_packed_streaks_are_small_and_exact():
    history = SuccessHistory(10_000, LIMITS, seed=0)
    assert history.pack() == ""
    draw = np.random.default_rng(0)
    for row, result in zip(draw.integers(0, 10_000, 30_000), draw.integers(-1, 2, 30_000), strict=True):
        history.record(int(row), int(result))
    packed = history.pack()
    assert len(packed) < 10_000
    again = SuccessHistory(10_000, LIMITS, packed, seed=0)
    assert [again.interval(row) for row in range(10_000)] == [history.interval(row) for row in range(10_000)]


def test_data_that_has_grown_or_shrunk_keeps_what_is_known():
    history = SuccessHistory(3, LIMITS, seed=0)
    history.record(1, -1)
    assert unpack(history.pack(), 5).tolist() == [0, -1, 0, 0, 0]
    assert unpack(history.pack(), 2).tolist() == [0, -1]
