"""Scored groups to training samples. Pure.

Invariants: an invalid result is masked, never a zero; each episode becomes exactly one sample, masked or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rljob_api.manifest.algorithm import Algorithm
from rljob_api.manifest.reward import Reward
from rljob_trainer.algorithms.advantages import compute_advantages
from rljob_trainer.episodes.types import Episode, Group, TrainSample

Logprobs = dict[tuple[int, int], list[float]]
"""(group, sample) -> [tokens]"""


def weighted_score(episode: Episode, rewards: Sequence[Reward]) -> float | None:
    """Return the weighted sum of an episode's rewards; None if one is missing or invalid, or the sum overflows."""
    total = 0.0
    for reward in rewards:
        result = episode.results.get(reward.name)
        if result is None or result.score is None:
            return None
        total += reward.weight * result.score
    return total if math.isfinite(total) else None


def usable_scores(group: Group, rewards: Sequence[Reward]) -> list[float | None]:
    """Return the group's scores, None for each sample that must not be trained on.  [samples]"""
    drops_group = {reward.name for reward in rewards if reward.failure_policy.action == "dropGroup"}
    for episode in group.episodes:
        if any(not episode.results[name].valid for name in drops_group if name in episode.results):
            return [None] * len(group.episodes)
    return [episode.score for episode in group.episodes]


def build_samples(
    groups: Sequence[Group], rewards: Sequence[Reward], algorithm: Algorithm, old_logprobs: Logprobs | None = None
) -> list[TrainSample]:
    """Return the training samples of `groups` in their order. The loss mask of a masked sample is all zeros."""
    scores = [usable_scores(group, rewards) for group in groups]
    advantages = compute_advantages(
        scores, normalization=algorithm.normalization, zero_std_threshold=algorithm.zero_std_threshold
    )
    return [
        TrainSample(
            token_ids=segment.token_ids,
            loss_mask=[0] * len(segment.token_ids) if score is None else segment.loss_mask,
            rollout_logprobs=segment.logprobs,
            advantage=advantage,
            old_logprobs=old_logprobs[episode.group, episode.sample] if old_logprobs else None,
        )
        for group, group_scores, group_advantages in zip(groups, scores, advantages, strict=True)
        for episode, score, advantage in zip(group.episodes, group_scores, group_advantages, strict=True)
        for segment in episode.segments
    ]
