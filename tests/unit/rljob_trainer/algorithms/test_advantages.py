"""Advantages: normalization, masked samples, and extreme scores."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.algorithms.advantages import has_signal, normalize

SCORES = st.one_of(st.none(), st.floats(-10, 10, allow_nan=False).map(lambda score: round(score, 3)))
NORMALIZATIONS = ("group", "batch", "none")


@given(groups=st.lists(st.lists(SCORES, min_size=1, max_size=8), min_size=1, max_size=6))
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_invalid_samples_do_not_change_advantages_of_valid_ones(normalization, groups):
    settings = {"normalization": normalization, "zero_std_threshold": 1e-2}
    with_invalid = normalize(groups, **settings)
    valid_only = normalize([[s for s in group if s is not None] for group in groups], **settings)
    for group, found, expected in zip(groups, with_invalid, valid_only, strict=True):
        assert [a for score, a in zip(group, found, strict=True) if score is not None] == expected
        assert all(a == 0.0 for score, a in zip(group, found, strict=True) if score is None), "masked means 0"


def test_group_normalization_centres_and_divides_by_the_sample_deviation():
    [found] = normalize([[1.0, 2.0, 3.0]], normalization="group", zero_std_threshold=0.0)
    assert found == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)


def test_batch_normalization_divides_by_the_deviation_of_all_scores():
    found = normalize([[0.0, 2.0], [10.0, 12.0]], normalization="batch", zero_std_threshold=0.0)
    deviation = (2 * 6**2 + 2 * 4**2) / 3
    assert found[0] == pytest.approx([-1 / deviation**0.5, 1 / deviation**0.5], abs=1e-5)


def test_no_normalization_only_centres():
    assert normalize([[0.0, 1.0]], normalization="none", zero_std_threshold=0.0) == [[-0.5, 0.5]]


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_float_noise_is_not_a_signal(normalization):
    groups = [[1.0, 1.0 + 1e-7, 1.0 - 1e-7]]
    assert normalize(groups, normalization=normalization, zero_std_threshold=1e-2) == [[0.0] * 3]


def test_fewer_than_two_valid_scores_are_not_a_signal():
    assert not has_signal([1.0, None, None], 0.0)
    assert not has_signal([], 0.0)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_huge_score_gives_finite_advantages(normalization):
    settings = {"normalization": normalization, "zero_std_threshold": 1e-2}
    huge, other = normalize([[1e200, 0.0, -1e200], [0.0, 1.0, 2.0]], **settings)
    assert all(math.isfinite(advantage) for advantage in huge + other)
    assert huge[0] > huge[1] > huge[2], "the order of the scores is kept"
    if normalization == "group":
        assert huge == pytest.approx([1.0, 0.0, -1.0])
        assert other == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5), "other groups are unaffected"
