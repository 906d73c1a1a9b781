"""Advantages: normalization, masked samples, and extreme scores."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.algorithms.advantages import has_signal, normalize, whiten
from rljob_trainer.algorithms.base import EpisodeAdvantages
from rljob_trainer.algorithms.registry import build_algorithm
from tests.support.algorithms import algorithm_spec, rewards_of

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


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ([0.01, 0.0, 0.005], True),  # a small scale
        ([0.1] + [0.0] * 127, True),  # one success in 128, with weight 0.1
        ([1.0, 1.0 + 1e-7, 1.0 - 1e-7], False),
        ([1.0, 1.005, 0.995], False),  # within the threshold
        ([100.0, 100.5, 101.0], True),  # an offset hides nothing
        ([5.6e-17, 0.0, -5.6e-17], False),  # 0.1 + 0.2 - 0.3
        ([0.0, 0.0], False),
    ],
)
def test_threshold_is_relative_to_the_scale_of_the_rewards(group, expected):
    assert has_signal(group, 1e-2) is expected
    [advantages] = normalize([group], normalization="group", zero_std_threshold=1e-2)
    assert any(advantages) is expected


def test_leave_one_out_mean_is_that_of_the_others():
    [found] = build_algorithm(algorithm_spec(type="rloo")).advantages([[rewards_of(s) for s in (0.0, 1.0, 5.0)]])
    assert [each.advantages[0] for each in found] == pytest.approx([0 - 3, 1 - 2.5, 5 - 0.5])


def test_each_reward_alone_has_the_influence_of_its_weight():
    spec = algorithm_spec(weights=(1.0, 1.0), advantages={"perReward": True})
    algorithm = build_algorithm(spec)
    assert algorithm.needs.whole_step
    small, large = [0.0, 0.01, 0.0, 0.01], [0.0, 0.0, 8.0, 8.0]
    group = [rewards_of(a + b, components=[a, b, 0.0]) for a, b in zip(small, large, strict=True)]
    [found] = algorithm.advantages([group])
    values = [each.advantages[0] for each in found]
    assert values[1] == pytest.approx(values[2]), "either reward alone is worth the same"
    deviation_of_values = math.sqrt(sum(value**2 for value in values) / 3)
    assert deviation_of_values == pytest.approx(1.0), "over the batch"
    weighted = build_algorithm(algorithm_spec(weights=(1.0, 3.0), advantages={"perReward": True}))
    [[neither, first, second, both]] = [[e.advantages[0] for e in group] for group in weighted.advantages([group])]
    assert first == pytest.approx(-second) == pytest.approx(-both / 2) == pytest.approx(neither / 2), "1 - 3 to 1 + 3"
    [together] = build_algorithm(algorithm_spec(weights=(1.0, 1.0))).advantages([group])
    assert together[1].advantages[0] < 0 < together[2].advantages[0], "the small reward does not count"


def test_batch_baseline_teaches_which_prompts_are_easy():
    algorithm = build_algorithm(algorithm_spec(type="reinforcePlusPlus"))
    groups = [[rewards_of(1.0, 2), rewards_of(1.0, 1)], [rewards_of(0.0, 1), rewards_of(0.0, 1)]]
    found = algorithm.advantages(groups)
    tokens = [value for group in found for each in group for value in each.advantages]
    std = math.sqrt((3 * 0.4**2 + 2 * 0.6**2) / 4)
    assert tokens == pytest.approx([0.4 / std] * 3 + [-0.6 / std] * 2), "over tokens, whose mean is 0.6"


def test_kl_penalty_of_reinforce_plus_plus_is_in_its_returns():
    spec = algorithm_spec(type="reinforcePlusPlus", kl={"coefficient": 0.1, "estimator": "k1"})
    group = [rewards_of(1.0, 2, reference_kl=np.array([1.0, 2.0])), rewards_of(0.0, 1, reference_kl=np.array([-1.0]))]
    [found] = build_algorithm(spec).advantages([group])
    returns = np.array([1 - 0.3, 1 - 0.2, 0.1])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    assert np.concatenate([each.advantages for each in found]).tolist() == pytest.approx(expected.tolist())


def test_batch_baseline_gives_no_advantage_without_differences():
    algorithm = build_algorithm(algorithm_spec(type="reinforcePlusPlus"))
    assert [each.advantages[0] for each in algorithm.advantages([[rewards_of(1.0), rewards_of(1.0)]])[0]] == [0, 0]
    assert algorithm.advantages([[None, None]]) == [[None, None]]
    huge = algorithm.advantages([[rewards_of(1e200), rewards_of(-1e200)]])[0]
    assert [each.advantages[0] for each in huge] == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_baseline_of_the_group_is_subtracted_before_the_batch_is_whitened():
    """What prompts differ by is in the deviation of grpo's batch normalization, and not in the paper's."""
    groups = [[rewards_of(10.0, 3), rewards_of(9.0, 1)], [rewards_of(0.0, 1), rewards_of(1.0, 1)]]
    found = build_algorithm(algorithm_spec(type="reinforcePlusPlusBaseline")).advantages(groups)
    centered = np.array([0.5] * 3 + [-0.5, -0.5, 0.5])
    expected = (centered - centered.mean()) / centered.std(ddof=1)
    assert [value for group in found for each in group for value in each.advantages] == pytest.approx(expected)
    batch = build_algorithm(algorithm_spec(advantages={"normalization": "batch"})).advantages(groups)
    assert batch[0][0].advantages[0] == pytest.approx(0.5 / np.std([10, 9, 0, 1], ddof=1))


def test_kl_penalty_in_the_reward_is_whitened_with_the_centered_rewards():
    spec = algorithm_spec(type="reinforcePlusPlusBaseline", kl={"coefficient": 0.1, "estimator": "k1"})
    group = [rewards_of(1.0, 2, reference_kl=np.array([1.0, 2.0])), rewards_of(0.0, 1, reference_kl=np.array([-1.0]))]
    [found] = build_algorithm(spec).advantages([group])
    penalized = np.array([0.5 - 0.3, 0.5 - 0.2, -0.5 + 0.1])  # the penalty's own mean falls out
    expected = (penalized - penalized.mean()) / penalized.std(ddof=1)
    assert np.concatenate([each.advantages for each in found]).tolist() == pytest.approx(expected.tolist())


def test_whitening_amplifies_no_rounding():
    noise = [[EpisodeAdvantages(np.array([1e-9, -1e-9])), None], [EpisodeAdvantages(np.array([0.0]))]]
    assert [e and e.advantages.tolist() for group in whiten(noise) for e in group] == [[0, 0], None, [0]]
    assert whiten([]) == []


def test_turn_rewards_count_in_the_turn_and_not_before_it():
    """Both got 1 in all; the second got it before its last turn, so that turn earned nothing."""
    turns = np.array([0, 1], np.int32)
    late = rewards_of(0.0, turn_rewards=[0.0, 1.0], turn_of_token=turns)
    early = rewards_of(0.0, turn_rewards=[1.0, 0.0], turn_of_token=turns)
    algorithm = build_algorithm(algorithm_spec(type="drGrpo"))
    [[first, second]] = algorithm.advantages([[late, early]])
    assert first.advantages.tolist() == [0.0, 1.0]
    assert second.advantages.tolist() == [0.0, -1.0]
    [[alone, masked]] = algorithm.advantages([[late, None]])
    assert masked is None
    assert len(alone.advantages) == 2


def test_deviation_of_the_batch_includes_what_turns_earned():
    turns = np.array([0], np.int32)
    group = [rewards_of(1.0, turn_rewards=[value], turn_of_token=turns) for value in (2.0, 0.0)]
    [found] = build_algorithm(algorithm_spec(advantages={"normalization": "batch"})).advantages([group])
    assert [each.advantages[0] for each in found] == pytest.approx([2 / 2**0.5, -2 / 2**0.5]), "3 and 1 deviate by 2^.5"


def test_rounding_of_turn_rewards_gives_no_advantage():
    turns = np.array([0], np.int32)
    group = [rewards_of(0.0, turn_rewards=[value], turn_of_token=turns) for value in (0.1 + 0.2, 0.3)]
    [found] = build_algorithm(algorithm_spec()).advantages([group])
    assert all(abs(each.advantages[0]) < 1e-9 for each in found)
