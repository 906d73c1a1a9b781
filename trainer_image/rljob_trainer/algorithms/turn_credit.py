"""Advantages for each turn, from rewards that an environment gives after a turn. Pure numpy.

    G(i,k)   return of episode i from turn k on: its reward, plus discount x G(i,k+1). The score counts at the last turn
    b(i,k)   mean of G(j,k) over the other episodes j that reached turn k; 0 if none did
    A(i,k)   G(i,k) - b(i,k): the advantage of every token of turn k

First the returns, then one baseline for each decision. A baseline that does not depend on what the episode itself did
adds no bias. To centre the reward of each turn over the group and to add up afterwards does: every further turn then
subtracts a mean reward, so the number of turns, which the policy chooses, has a price. See docs/algorithms.md.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.algorithm import TurnRewards
from rljob_trainer.algorithms.base import EpisodeRewards, Floats


def has_turn_rewards(episode: EpisodeRewards) -> bool:
    return any(episode.turn_rewards)


def rewards_of_turns(episode: EpisodeRewards) -> Floats:
    """Return the reward of each turn; that of the last turn includes the episode's score.  [turns]"""
    num_turns = max(len(episode.turn_rewards), int(episode.turn_of_token.max(initial=0)) + 1)
    rewards = np.zeros(num_turns)
    rewards[: len(episode.turn_rewards)] = episode.turn_rewards
    rewards[-1] += episode.score
    return rewards


def returns_to_go(rewards: Floats, discount: float) -> Floats:
    """Return the discounted sum of the rewards from each turn on.  [turns] -> [turns]"""
    returns, following = np.zeros(len(rewards)), 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        returns[turn] = following = rewards[turn] + discount * following
    return returns


def turn_advantages(group: Sequence[EpisodeRewards], settings: TurnRewards) -> list[Floats]:
    """Return the advantage of each turn of the group's episodes, in the unit of the rewards.  [episodes][turns]

    If no other episode has a reward for a turn, the baseline of all turns is the mean return of the others from their
    first turn on: what an algorithm without turns would subtract. What the episode itself got must not decide that.
    """
    returns = [returns_to_go(rewards_of_turns(episode), settings.discount) for episode in group]
    rewarded = [has_turn_rewards(episode) for episode in group]
    advantages = []
    for i, own in enumerate(returns):
        others = [other for j, other in enumerate(returns) if j != i]
        if not any(rewarded[:i] + rewarded[i + 1 :]):
            others = [np.full(len(own), other[0]) for other in others]
        advantages.append(own - [_baseline(own, others, turn, settings) for turn in range(len(own))])
    return advantages


def _baseline(own: Floats, others: Sequence[Floats], turn: int, settings: TurnRewards) -> float:
    compared = [other[turn] for other in others if len(other) > turn]
    if settings.baseline == "group":
        compared.append(own[turn])
    return 0.0 if settings.baseline == "none" or not compared else float(np.mean(compared))


def one_divisor(group: Sequence[EpisodeRewards], advantages: Sequence[Floats], settings: TurnRewards) -> float:
    """Return one number by which to divide all advantages of a group: the standard deviation of its episodes' returns.

    A divisor for each turn would weigh decisions by how much others vary there. If the returns are almost the same and
    the way to them is not, the root mean square of the advantages is larger, and nothing is blown up.
    """
    totals = [returns_to_go(rewards_of_turns(episode), settings.discount)[0] for episode in group]
    deviation = float(np.std(totals, ddof=1)) if len(totals) > 1 else 0.0
    return max(deviation, float(np.sqrt(np.mean(np.concatenate(advantages) ** 2))))


def to_tokens(of_turns: Floats, turn_of_token: NDArray[np.int32]) -> Floats:  # [turns], [sampled] -> [sampled]
    """Give each token the advantage of its turn."""
    return of_turns[turn_of_token]
