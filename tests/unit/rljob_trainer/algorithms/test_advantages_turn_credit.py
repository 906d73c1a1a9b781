"""Turn-level credit: formulas by hand, and exact expectations over every outcome of a small policy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest

from rljob_api.manifest.algorithm import AlgorithmType, TurnRewards
from rljob_trainer.algorithms.advantages import one_divisor, returns_to_go, to_tokens, turn_advantages
from rljob_trainer.algorithms.base import EpisodeRewards, Floats
from rljob_trainer.algorithms.registry import build_algorithm
from tests.support.algorithms import algorithm_spec


def episode(turn_rewards: Sequence[float], score: float = 0.0) -> EpisodeRewards:
    return EpisodeRewards(score, turn_rewards, np.arange(len(turn_rewards), dtype=np.int32))


def test_returns_to_go_are_discounted_by_turn():
    assert returns_to_go(np.array([1.0, 0.0, 4.0]), 0.5) == pytest.approx([2.0, 2.0, 4.0])


GROUP = [episode([1.0, 0.0, 2.0], 1.0), episode([0.0, 3.0]), episode([2.0], 0.5)]
"""Returns: (4, 3, 3), (3, 3), (2.5)."""


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        # From turn 2 on, only the first runs.
        ("leaveOneOut", [[4 - 2.75, 3 - 3, 3], [3 - 3.25, 3 - 3], [2.5 - 3.5]]),
        ("group", [[4 - 9.5 / 3, 0, 0], [3 - 9.5 / 3, 0], [2.5 - 9.5 / 3]]),
        ("none", [[4, 3, 3], [3, 3], [2.5]]),
    ],
)
def test_baseline_is_the_mean_return_of_those_that_reached_the_turn(baseline, expected):
    ours = turn_advantages(GROUP, TurnRewards(baseline=baseline))
    assert [turns.tolist() for turns in ours] == [pytest.approx(turns) for turns in expected]


def test_score_at_the_end_gives_leave_one_out_among_those_still_running():
    """One reward of 0.0 more than nothing, so that the credit of turns applies."""
    group = [episode([0.0, 1e-12], 1.0), episode([0.0, 1e-12], 0.0), episode([1e-12], 4.0)]
    ours = turn_advantages(group, TurnRewards())
    assert [turns[0] for turns in ours] == pytest.approx([1 - 2, 0 - 2.5, 4 - 0.5]), "RLOO"
    assert [turns[1] for turns in ours[:2]] == pytest.approx([1 - 0, 0 - 1])


def test_divisor_is_one_number_and_blows_nothing_up():
    turns = turn_advantages(GROUP, TurnRewards(baseline="group"))
    assert one_divisor(GROUP, turns, TurnRewards()) == pytest.approx(np.std([4, 3, 2.5], ddof=1))
    same_total = [episode([1.0, 0.0]), episode([0.0, 1.0])]
    turns = turn_advantages(same_total, TurnRewards())
    assert turns[0].tolist() == [0, -1]
    assert one_divisor(same_total, turns, TurnRewards()) == pytest.approx(math.sqrt(2 / 4))


def test_tokens_get_the_advantage_of_their_turn():
    assert to_tokens(np.array([3.0, 5.0]), np.array([0, 0, 1], np.int32)).tolist() == [3, 3, 5]


# A policy whose every outcome is enumerated: in each turn it chooses one of two answers, then continues or stops.
# Parameters: for each turn, the logit of the second answer, and that of continuing.
MAX_TURNS = 3


@dataclass(frozen=True)
class Outcome:
    probability: float
    rewards: EpisodeRewards
    scores: Floats
    """[turns, parameters] Gradient of each turn's log-probability: its answer, then continuing or stopping."""


Reward = Callable[[Sequence[int]], float]


def outcomes(logits: Floats, reward: Reward, score: Reward) -> Iterator[Outcome]:
    """logits  # [turns, 2]. `reward` and `score` get the answers up to a turn, and all answers."""
    second, continuing = (1 / (1 + np.exp(-logits))).T
    for num_turns in range(1, MAX_TURNS + 1):
        for answers in itertools.product([0, 1], repeat=num_turns):
            probability, gradient = 1.0, np.zeros((num_turns, MAX_TURNS, 2))
            for turn, answer in enumerate(answers):
                probability *= second[turn] if answer else 1 - second[turn]
                gradient[turn, turn, 0] = answer - second[turn]
                if turn < MAX_TURNS - 1:
                    continues = turn < num_turns - 1
                    probability *= continuing[turn] if continues else 1 - continuing[turn]
                    gradient[turn, turn, 1] = continues - continuing[turn]
            turn_rewards = [reward(answers[: turn + 1]) for turn in range(num_turns)]
            yield Outcome(probability, episode(turn_rewards, score(answers)), gradient.reshape(num_turns, -1))


Estimator = Callable[[Sequence[EpisodeRewards]], Sequence[Floats]]


def expected_gradient(every: Sequence[Outcome], estimator: Estimator, group_size: int) -> Floats:
    """The exact expectation of what the estimator adds up for one episode of a group.  [parameters]"""
    total = np.zeros(MAX_TURNS * 2)
    for group in itertools.product(every, repeat=group_size):
        probability = math.prod(outcome.probability for outcome in group)
        first = estimator([outcome.rewards for outcome in group])[0]
        total += probability * (first[:, None] * group[0].scores).sum(axis=0)
    return total


def true_gradient(logits: Floats, reward: Reward, score: Reward) -> Floats:
    """Central differences of the expected sum of all rewards.  [parameters]"""

    def objective(flat: Floats) -> float:
        every = outcomes(flat.reshape(MAX_TURNS, 2), reward, score)
        return sum(o.probability * (sum(o.rewards.turn_rewards) + o.rewards.score) for o in every)

    steps = np.eye(MAX_TURNS * 2) * 1e-5
    flat = logits.ravel()
    return np.array([(objective(flat + step) - objective(flat - step)) / 2e-5 for step in steps])


def ours(group: Sequence[EpisodeRewards]) -> Sequence[Floats]:
    return turn_advantages(group, TurnRewards())


def centered_then_added(group: Sequence[EpisodeRewards]) -> Sequence[Floats]:
    """The estimator of verl's RFC 7244: each turn's reward minus its mean over the group, then returns to go."""

    def mean(turn: int) -> float:
        return float(np.mean([e.turn_rewards[turn] for e in group if len(e.turn_rewards) > turn]))

    return [
        returns_to_go(np.array([reward - mean(turn) for turn, reward in enumerate(e.turn_rewards)]), 1.0) for e in group
    ]


LOGITS = np.array([[0.3, -0.4], [-0.2, 0.7], [0.5, 0.0]])


def test_cost_of_every_turn_is_unseen_when_centered_by_turn_and_exact_with_ours():
    """Every turn costs 1, and nothing else matters. Centered by turn, every cost is 0, as if a further turn came with
    a bonus of 1. The true gradient of -E[turns] is known."""
    every = list(outcomes(LOGITS, lambda _: -1.0, lambda _: 0.0))
    first, second = 1 / (1 + np.exp(-LOGITS[:2, 1]))
    known = np.zeros((MAX_TURNS, 2))
    known[0, 1] = -first * (1 - first) * (1 + second)  # E[turns] = 1 + first x (1 + second)
    known[1, 1] = -first * second * (1 - second)
    for group_size in (2, 3):
        assert expected_gradient(every, ours, group_size) == pytest.approx(known.ravel(), abs=1e-12)
        assert expected_gradient(every, centered_then_added, group_size) == pytest.approx(np.zeros(6), abs=1e-12)


REWARDS: dict[str, tuple[Reward, Reward]] = {
    "dense": (lambda answers: 0.5 * answers[-1] - 0.25 * len(answers), lambda answers: float(sum(answers) == 2)),
    # Many groups have no reward of a turn, or only one member with some.
    "sparse": (lambda answers: 2.0 * (answers == (1, 0)), lambda answers: 1.0 * answers[0] + len(answers)),
    "score alone": (lambda _: 0.0, lambda answers: float(answers[-1])),
}


def rloo(group: Sequence[EpisodeRewards]) -> Sequence[Floats]:
    """The advantages of tokens, which are as many as turns here."""
    (found,) = build_algorithm(algorithm_spec(type="rloo")).advantages([group])
    return [episode.advantages for episode in found if episode is not None]


@pytest.mark.parametrize("estimator", [ours, rloo])
@pytest.mark.parametrize("name", REWARDS)
def test_expected_gradient_of_ours_is_the_true_gradient(name, estimator):
    every = list(outcomes(LOGITS, *REWARDS[name]))
    assert sum(outcome.probability for outcome in every) == pytest.approx(1)
    true = true_gradient(LOGITS, *REWARDS[name])
    assert expected_gradient(every, estimator, 2) == pytest.approx(true, abs=1e-8)


def test_expected_gradient_of_ours_is_the_true_gradient_in_larger_groups():
    every = list(outcomes(LOGITS, *REWARDS["sparse"]))
    assert expected_gradient(every, ours, 3) == pytest.approx(true_gradient(LOGITS, *REWARDS["sparse"]), abs=1e-8)


@pytest.mark.parametrize("name", [name for name in get_args(AlgorithmType) if name != "ppo"])
def test_turns_without_rewards_change_nothing(name):
    algorithm = build_algorithm(algorithm_spec(type=name, turnRewards={"discount": 1.0}))
    turns = [[0, 1, 1], [0], [0, 0, 1, 2]]
    scores = [1.0, 0.25, -2.0]

    def advantages(turns: Sequence[Sequence[int]]) -> list[list[float]]:
        group = [
            EpisodeRewards(score, [0.0] * (max(of_token) + 1), np.array(of_token, np.int32), components=[score, 0.0])
            for score, of_token in zip(scores, turns, strict=True)
        ]
        (found,) = algorithm.advantages([group])
        return [episode.advantages.tolist() for episode in found if episode is not None]

    assert advantages(turns) == advantages([[0] * len(of_token) for of_token in turns])


def test_centering_by_turn_is_biased_when_rewards_depend_on_answers():
    reward, _ = REWARDS["dense"]
    every = list(outcomes(LOGITS, reward, lambda _: 0.0))
    true = true_gradient(LOGITS, reward, lambda _: 0.0)
    assert abs(expected_gradient(every, centered_then_added, 3) - true).max() > 0.01
