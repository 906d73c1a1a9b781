"""Generalized advantage estimation (Schulman et al., arXiv:1506.02438) over tokens, or over turns. Pure numpy.

Invariant: an advantage plus the value to which it refers is the critic's target. With decay and discount 1, a target is
the sum of the rewards from there on, whatever the critic says.
"""

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.algorithms.advantages import rewards_of_turns
from rljob_trainer.algorithms.base import EpisodeAdvantages, EpisodeRewards, Floats


def estimate(rewards: Floats, values: Floats, *, discount: float, decay: float) -> Floats:
    """Return the advantage of each action of an episode. The value after the last action is 0.

    delta_t = reward_t + discount x value_(t+1) - value_t; advantage_t = delta_t + discount x decay x advantage_(t+1).
    rewards, values, result  # [actions]
    """
    advantages, following = np.zeros(len(rewards)), 0.0
    deltas = rewards + discount * np.append(values[1:], 0.0) - values
    for t in range(len(rewards) - 1, -1, -1):
        advantages[t] = following = deltas[t] + discount * decay * following
    return advantages


def over_tokens(episode: EpisodeRewards, penalties: Floats, *, discount: float, decay: float) -> EpisodeAdvantages:
    """Return advantages and targets with each token as one action. A turn's reward is given at its last token.

    `penalties`  # [sampled] subtracted from the reward of each token
    """
    values, (starts, rewards_of_starts) = _values(episode), _turns(episode)
    rewards = -penalties
    rewards[np.append(starts, len(rewards))[1:] - 1] += rewards_of_starts
    advantages = estimate(rewards, values, discount=discount, decay=decay)
    return EpisodeAdvantages(advantages, advantages + values)


def over_turns(episode: EpisodeRewards, penalties: Floats, *, discount: float, decay: float) -> EpisodeAdvantages:
    """Return advantages and targets with each turn as one action, whose value is that before its first token (Turn-PPO,
    arXiv:2512.17008). All tokens of a turn share both."""
    values, (starts, rewards_of_starts) = _values(episode), _turns(episode)
    rewards = rewards_of_starts - np.add.reduceat(penalties, starts)
    advantages = estimate(rewards, values[starts], discount=discount, decay=decay)
    lengths = np.diff(np.append(starts, len(values)))
    return EpisodeAdvantages(np.repeat(advantages, lengths), np.repeat(advantages + values[starts], lengths))


def _turns(episode: EpisodeRewards) -> tuple[NDArray[np.int64], Floats]:
    """Return the first token of each turn that has tokens, and its reward. The reward of a turn without tokens counts
    for the one before it."""
    turns, starts = np.unique(episode.turn_of_token, return_index=True)
    return starts, np.add.reduceat(rewards_of_turns(episode), np.append(0, turns[1:])[: len(turns)])


def _values(episode: EpisodeRewards) -> Floats:
    if episode.values is None:
        raise ValueError("GAE needs the critic's values")
    return episode.values
