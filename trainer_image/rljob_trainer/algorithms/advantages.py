"""Rewards to advantages: what the algorithms share. Pure.

None is a masked episode: it enters no mean, deviation or count. Invariant: the others get exactly the advantages that
they would have without it, in any order of groups and episodes.

For each turn, from rewards that an environment gives after a turn:

    G(i,k)   return of episode i from turn k on: its reward, plus discount x G(i,k+1). The score counts at the last turn
    b(i,k)   mean of G(j,k) over the other episodes j that reached turn k; 0 if none did
    A(i,k)   G(i,k) - b(i,k): the advantage of every token of turn k

First the returns, then one baseline for each decision. A baseline that does not depend on what the episode itself did
adds no bias. To centre the reward of each turn over the group and to add up afterwards does: every further turn then
subtracts a mean reward, so the number of turns, which the policy chooses, has a price. See docs/algorithms.md.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.algorithm import Normalization, TurnRewards
from rljob_trainer.algorithms.base import EpisodeAdvantages, EpisodeRewards, Floats, Settings
from rljob_trainer.algorithms.kl import kl_returns


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


Groups = Sequence[Sequence[EpisodeRewards | None]]
"""[groups][episodes]"""
Scores = Sequence[float | None]
"""[episodes] of one group."""

_SCORE_PRECISION = 1e-7
"""Differences of this size are rounding, whatever the scale of the rewards."""


def group_advantages(
    groups: Groups, settings: Settings, *, leave_one_out: bool = False
) -> list[list[EpisodeAdvantages | None]]:
    """Return rewards minus the group's mean, divided as `settings.normalization` says; for groups with rewards of
    turns, what turn_credit says. A KL penalty in the reward is subtracted from each token.

    `leave_one_out`: the mean of the others. It differs from the group's mean by the factor n / (n - 1) of the result.
    """
    scores = [[None if episode is None else total_reward(episode) for episode in group] for group in groups]
    if settings.algorithm.advantages.per_reward:
        centered = normalize_per_reward(groups, settings)
    else:
        centered = normalize(
            scores, normalization=settings.normalization, zero_std_threshold=settings.algorithm.zero_std_threshold
        )
    batch_std = deviation([score for group in scores for score in group if score is not None])
    advantages = []
    for group, of_episodes in zip(groups, centered, strict=True):
        if any(has_turn_rewards(episode) for episode in group if episode is not None):
            tokens = _from_turns(group, settings, batch_std)
        else:
            n = len(group) - group.count(None)
            factor = n / (n - 1) if leave_one_out and n > 1 else 1.0
            tokens = [
                None if episode is None else np.broadcast_to(np.float64(factor * value), len(episode.turn_of_token))
                for episode, value in zip(group, of_episodes, strict=True)
            ]
        advantages.append(penalize(group, tokens, settings))
    return advantages


def normalize(
    groups: Sequence[Scores], *, normalization: Normalization, zero_std_threshold: float
) -> list[list[float]]:
    """Return centered and divided scores, 0 for masked episodes and without signal.  [groups][episodes]"""
    batch_std = deviation([score for group in groups for score in group if score is not None])
    normalized = []
    for group in groups:
        valid = [score for score in group if score is not None]
        if not has_signal(group, zero_std_threshold):
            normalized.append([0.0] * len(group))
            continue
        mean = average(valid)
        divisor = {"group": deviation(valid), "batch": batch_std, "none": 1.0}[normalization]
        normalized.append([0.0 if score is None else (score - mean) / divisor for score in group])
    return normalized


def normalize_per_reward(groups: Groups, settings: Settings) -> list[list[float]]:
    """Return GDPO's advantages (arXiv:2601.05242): each reward is normalized alone, the weighted sum is divided by its
    deviation in the batch.  [groups][episodes]"""
    weights = (*settings.reward_weights, 1.0)  # what a long answer loses has its own size
    sums = [np.zeros(len(group)) for group in groups]
    for number, weight in enumerate(weights):
        alone = [[None if episode is None else episode.components[number] for episode in group] for group in groups]
        threshold = settings.algorithm.zero_std_threshold
        parts = normalize(alone, normalization=settings.normalization, zero_std_threshold=threshold)
        sums = [total + weight * np.array(part) for total, part in zip(sums, parts, strict=True)]
    pairs = [zip(total, group, strict=True) for total, group in zip(sums, groups, strict=True)]
    valid = [float(value) for pair in pairs for value, episode in pair if episode is not None]
    return [list(total / (deviation(valid) or 1.0)) for total in sums]


def whiten(
    groups: Sequence[Sequence[EpisodeAdvantages | None]], zero_std_threshold: float = 0.0
) -> list[list[EpisodeAdvantages | None]]:
    """Shift the advantages of all tokens of the step to mean 0, and divide them by their sample standard deviation.
    All are 0 without a signal (see is_signal). The critic's targets stay.  [groups][episodes]"""
    tokens = np.concatenate([np.zeros(0), *(e.advantages for group in groups for e in group if e is not None)])
    largest = float(np.abs(tokens).max(initial=0.0))
    scaled = tokens / (largest or 1.0)  # squares of huge rewards are not finite
    mean, std = (largest * scaled.mean(), largest * scaled.std(ddof=1)) if len(tokens) > 1 else (0.0, 0.0)
    divisor = std if is_signal(std, largest, zero_std_threshold) else math.inf
    return [
        [e and dataclasses.replace(e, advantages=(e.advantages - mean) / divisor) for e in group] for group in groups
    ]


def penalize(
    group: Sequence[EpisodeRewards | None], tokens: Sequence[Floats | None], settings: Settings
) -> list[EpisodeAdvantages | None]:
    """Subtract the KL penalty of each token and of those after it, if the penalty is in the reward. Its baseline is the
    group's mean, and no deviation divides it: the coefficient keeps its meaning."""
    if not settings.kl_in_reward:
        return [None if values is None else EpisodeAdvantages(values) for values in tokens]
    penalties = [
        None if episode is None else settings.algorithm.kl.coefficient * kl_returns(episode) for episode in group
    ]
    known = np.concatenate([np.zeros(0), *(values for values in penalties if values is not None)])
    mean = known.mean() if len(known) else 0.0
    return [
        None if values is None or penalty is None else EpisodeAdvantages(values - (penalty - mean))
        for values, penalty in zip(tokens, penalties, strict=True)
    ]


def _from_turns(group: Sequence[EpisodeRewards | None], settings: Settings, batch_std: float) -> list[Floats | None]:
    valid = [episode for episode in group if episode is not None]
    turns = turn_advantages(valid, settings.algorithm.turn_rewards)
    divisors = {
        "group": one_divisor(valid, turns, settings.algorithm.turn_rewards),
        "batch": batch_std,
        "none": 1.0,
    }
    divisor = divisors[settings.normalization]
    divisor = divisor if divisor > _SCORE_PRECISION else 1.0
    found = iter(turns)
    return [None if episode is None else to_tokens(next(found) / divisor, episode.turn_of_token) for episode in group]


def total_reward(episode: EpisodeRewards) -> float:
    """Return the score plus what the environment gave after the turns."""
    return math.fsum([episode.score, *episode.turn_rewards])


def has_signal(group: Scores, zero_std_threshold: float) -> bool:
    """Return whether a group's valid scores differ by more than rounding.

    The threshold is relative to the group's largest score, so that rewards of any scale train; above 1 it is absolute,
    so that an offset does not hide differences. Noise of 1e-7, divided by its deviation, would become an advantage:
    hence thresholds and not `std == 0`.
    """
    valid = [score for score in group if score is not None]
    return len(valid) >= 2 and is_signal(deviation(valid), max(map(abs, valid)), zero_std_threshold)


def is_signal(std: float, largest: float, zero_std_threshold: float) -> bool:
    """See has_signal. `largest`: the largest absolute score."""
    return std > max(zero_std_threshold * min(1.0, largest), _SCORE_PRECISION)


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1) in any order (fsum); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = average(values)
    differences = [value - mean for value in values]
    try:
        return math.sqrt(math.fsum(difference**2 for difference in differences) / (len(values) - 1))
    except OverflowError:  # one sample of 1e200 must not end a job
        scale = max(map(abs, differences))
        return scale * math.sqrt(math.fsum((difference / scale) ** 2 for difference in differences) / (len(values) - 1))


def average(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # a sum beyond all floats, or of both infinities
        return sum(value / len(values) for value in values)
