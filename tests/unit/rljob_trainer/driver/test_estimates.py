"""avg@n, pass@k and maj@n against counts over all draws and orders, and their intervals."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from rljob_trainer.driver.estimates import (
    Answer,
    estimate_majority,
    estimate_mean,
    estimate_pass,
    majority,
    pass_at,
)

Z = statistics.NormalDist().inv_cdf(0.975)


def answers(*values, texts=None):
    return [Answer(value, text) for value, text in zip(values, texts or [None] * len(values), strict=True)]


@pytest.mark.parametrize("count", range(1, 8))
def test_pass_at_is_the_share_of_all_draws_that_have_a_solved_answer(count):
    for solved, k in itertools.product(range(count + 1), range(1, count + 1)):
        draws = list(itertools.combinations([True] * solved + [False] * (count - solved), k))
        assert pass_at(count, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_is_exact_where_the_binomials_overflow():
    exact = 1 - math.comb(99_990, 4_000) / math.comb(100_000, 4_000)
    assert pass_at(100_000, 10, 4_000) == pytest.approx(exact, rel=1e-12)
    assert pass_at(1024, 0, 1024) == 0.0
    assert pass_at(1024, 1, 1024) == 1.0


def test_pass_at_is_unbiased_and_the_share_of_solved_answers_is_not():
    draw, share, k = random.Random(0), 0.2, 4
    counts = [sum(draw.random() < share for _ in range(8)) for _ in range(20_000)]
    truth = 1 - (1 - share) ** k
    assert np.mean([pass_at(8, solved, k) for solved in counts]) == pytest.approx(truth, abs=0.005)
    assert abs(np.mean([1 - (1 - solved / 8) ** k for solved in counts]) - truth) > 0.02


def test_prompts_without_enough_answers_are_in_no_pass_at():
    prompts = [answers(1, 0, 0, 0), answers(1, 1), []]
    assert estimate_pass(prompts, 4, 1.0).value == 1.0
    assert estimate_pass(prompts, 2, 1.0).value == (1 / 2 + 1) / 2
    assert estimate_pass(prompts, 8, 1.0) is None
    assert estimate_pass([answers(0.4, 0.6)], 1, 0.5).value == 0.5, "0.5 is the threshold"


def test_mean_counts_each_prompt_once():
    assert estimate_mean([answers(1, 1, 1, 1), answers(0)]).value == 0.5
    assert estimate_mean([[], []]) is None


def test_vote_is_the_mean_over_the_orders_in_which_its_first_text_may_come():
    draw = random.Random(1)
    for _ in range(30):
        given = [Answer(draw.choice([0.0, 0.5, 1.0]), draw.choice(["a", "b", "c", None])) for _ in range(5)]
        if all(answer.text is None for answer in given):
            continue
        assert majority(given) == pytest.approx(np.mean([first_vote(order) for order in itertools.permutations(given)]))


def first_vote(order):
    """The value of the most frequent text, and of its answers the first one's, in one order."""
    texts = [answer.text for answer in order if answer.text is not None]
    winner = max(texts, key=texts.count)
    return next(answer.value for answer in order if answer.text == winner)


def test_answers_without_a_text_have_no_vote():
    assert majority(answers(0, 0, 1, texts=[None, None, "4"])) == 1.0
    assert majority(answers(1, 1)) == 0.0
    assert estimate_majority([answers(1, texts=["4"]), answers(1)]).value == 0.5
    assert estimate_majority([answers(1, 1), answers(0)]) is None, "no reward names answers"


def test_interval_is_wilsons_where_each_prompt_is_solved_or_not():
    """Its bounds are the shares from which the found one is as far as 95 % of all samples of that share."""
    for solved, count in ((0, 20), (3, 20), (20, 20), (1, 1)):
        found = estimate_mean([answers(value) for value in [1] * solved + [0] * (count - solved)])
        for bound in (found.low, found.high):
            distance = Z * math.sqrt(bound * (1 - bound) / count)
            assert abs(solved / count - bound) == pytest.approx(distance, abs=1e-12)
        assert found.low <= solved / count <= found.high
        assert found.high - found.low > 0.1


def test_interval_is_of_prompts_and_not_of_answers():
    """The answers to a prompt are alike: to take them for independent would make the interval too narrow."""
    draw = np.random.default_rng(0)
    prompts = [answers(*draw.binomial(1, share, 16).astype(float)) for share in draw.beta(0.3, 0.3, 40)]
    means = [np.mean([answer.value for answer in each]) for each in prompts]
    found = estimate_mean(prompts)
    assert found.value == pytest.approx(np.mean(means))
    error = np.std(means, ddof=1) / np.sqrt(40)
    assert (found.low, found.high) == pytest.approx((np.mean(means) - Z * error, np.mean(means) + Z * error))
    assert found.high - found.low > 3 * 1.96 * np.sqrt(found.value * (1 - found.value) / (40 * 16))


def test_interval_stays_within_the_range_of_shares_and_is_unknown_for_one_prompt():
    found = estimate_mean([answers(1, 1), answers(1, 0)])
    assert (found.value, found.high) == (0.75, 1.0)
    assert estimate_mean([answers(-3), answers(5)]).high > 5, "scores have no such range"
    assert (estimate_mean([answers(1, 0)]).low, estimate_mean([answers(0.3)]).high) == (None, None)


def test_equal_values_have_an_interval_with_a_width_or_none():
    found = estimate_mean([answers(0.2)] * 16)
    assert found.value == pytest.approx(0.2)
    assert found.low < 0.1 < 0.3 < found.high
    assert (estimate_mean([answers(3.0)] * 16).low, estimate_mean([answers(0.2)]).low) == (None, None)
