"""GAE against a definition that shares nothing with it: the weighted sum of n-step advantages, term by term."""

from __future__ import annotations

import numpy as np
import pytest

from rljob_trainer.algorithms import gae
from rljob_trainer.algorithms.base import EpisodeRewards

TURNS = np.array([0, 0, 0, 1, 2, 2], np.int32)
VALUES = np.array([0.5, -0.25, 1.0, 0.125, 2.0, -1.0])
NO_PENALTIES = np.zeros(6)


def episode(turn_rewards: tuple[float, ...] = (1.0, 0.0, -2.0), score: float = 4.0) -> EpisodeRewards:
    return EpisodeRewards(score, turn_rewards, TURNS, values=VALUES)


def sum_of_steps(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """A_t = sum over n of (discount x decay)^n delta_(t+n), each delta from its definition."""
    result = []
    for t in range(len(rewards)):
        total = 0.0
        for n in range(len(rewards) - t):
            following = values[t + n + 1] if t + n + 1 < len(values) else 0.0
            delta = rewards[t + n] + discount * following - values[t + n]
            total += (discount * decay) ** n * delta
        result.append(total)
    return result


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.5, 1.0)])
def test_estimate_is_the_discounted_sum_of_temporal_differences(discount, decay):
    draw = np.random.default_rng(0)
    rewards, values = draw.normal(size=9), draw.normal(size=9)
    ours = gae.estimate(rewards, values, discount=discount, decay=decay)
    assert ours == pytest.approx(sum_of_steps(rewards.tolist(), values.tolist(), discount, decay))


def test_tokens_get_the_reward_of_a_turn_at_its_last_token_and_the_score_at_the_end():
    ours = gae.over_tokens(episode(), NO_PENALTIES, discount=0.9, decay=0.8)
    expected = sum_of_steps([0, 0, 1, 0, 0, 2], VALUES.tolist(), 0.9, 0.8)
    assert ours.advantages == pytest.approx(expected)
    assert ours.returns == pytest.approx(np.array(expected) + VALUES)


def test_tokens_of_a_turn_share_its_advantage_and_target():
    ours = gae.over_turns(episode(), NO_PENALTIES, discount=0.9, decay=0.8)
    first, second, third = sum_of_steps([1, 0, 2], [0.5, 0.125, 2.0], 0.9, 0.8)
    assert ours.advantages == pytest.approx([first] * 3 + [second] + [third] * 2)
    assert ours.returns == pytest.approx([first + 0.5] * 3 + [second + 0.125] + [third + 2.0] * 2)


@pytest.mark.parametrize("estimate", [gae.over_tokens, gae.over_turns])
def test_targets_are_returns_whatever_the_critic_says_without_decay_and_discount(estimate):
    ours = estimate(episode(), NO_PENALTIES, discount=1.0, decay=1.0)
    assert ours.returns == pytest.approx([3, 3, 3, 2, 2, 2])


def test_penalties_lower_the_rewards_of_their_tokens_and_turns():
    penalties = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    tokens = gae.over_tokens(episode(), penalties, discount=1.0, decay=1.0)
    assert tokens.returns == pytest.approx([3 - 2.1, 3 - 2.0, 3 - 1.8, 2 - 1.5, 2 - 1.1, 2 - 0.6])
    turns = gae.over_turns(episode(), penalties, discount=1.0, decay=1.0)
    assert turns.returns == pytest.approx([3 - 2.1] * 3 + [2 - 1.5] + [2 - 1.1] * 2)


def test_reward_of_a_turn_without_tokens_counts_for_the_turn_before_it():
    rewards = EpisodeRewards(1.0, (0.0, 5.0, 7.0, 0.0), np.array([0, 2], np.int32), values=np.zeros(2))
    ours = gae.over_turns(rewards, np.zeros(2), discount=1.0, decay=0.0)
    assert ours.advantages == pytest.approx([5.0, 8.0])


@pytest.mark.parametrize("estimate", [gae.over_tokens, gae.over_turns])
def test_episode_without_tokens_has_no_advantages(estimate):
    rewards = EpisodeRewards(1.0, (2.0,), np.zeros(0, np.int32), values=np.zeros(0))
    ours = estimate(rewards, np.zeros(0), discount=1.0, decay=1.0)
    assert len(ours.advantages) == len(ours.returns) == 0
