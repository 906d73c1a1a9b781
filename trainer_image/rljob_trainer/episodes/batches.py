"""Scored groups to training samples. Pure.

Invariants: an invalid result is masked, never a zero; each trajectory becomes exactly one sample, masked or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rljob_api.manifest.job_sections import Algorithm
from rljob_api.manifest.reward import Reward
from rljob_trainer.algorithms.advantages import compute_advantages
from rljob_trainer.episodes.types import Group, TrainSample, Trajectory

Logprobs = dict[tuple[int, int], list[float]]
"""(group, sample) -> [tokens]"""


def weighted_score(trajectory: Trajectory, rewards: Sequence[Reward]) -> float | None:
    """Return the weighted sum of a trajectory's rewards; None if one is missing or invalid, or the sum overflows."""
    total = 0.0
    for reward in rewards:
        result = trajectory.results.get(reward.name)
        if result is None or result.score is None:
            return None
        total += reward.weight * result.score
    return total if math.isfinite(total) else None


def usable_scores(group: Group, rewards: Sequence[Reward]) -> list[float | None]:
    """Return the group's scores, None for each sample that must not be trained on.  [samples]"""
    drops_group = {reward.name for reward in rewards if reward.failure_policy.action == "dropGroup"}
    for trajectory in group.trajectories:
        if any(not trajectory.results[name].valid for name in drops_group if name in trajectory.results):
            return [None] * len(group.trajectories)
    return [trajectory.score for trajectory in group.trajectories]


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
            token_ids=trajectory.token_ids,
            loss_mask=[0] * len(trajectory.token_ids) if score is None else trajectory.loss_mask,
            rollout_logprobs=trajectory.logprobs,
            advantage=advantage,
            old_logprobs=old_logprobs[trajectory.group, trajectory.sample] if old_logprobs else None,
        )
        for group, group_scores, group_advantages in zip(groups, scores, advantages, strict=True)
        for trajectory, score, advantage in zip(group.trajectories, group_scores, group_advantages, strict=True)
    ]
