"""Scored groups to training samples and mini-batches. Pure.

Owns which samples are masked (an invalid result is never a zero) and the weighted sum of several rewards. Leaves
scores to `rewards` and the loss to `losses`. Invariant: each trajectory becomes exactly one sample, masked or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rljob_api.manifest.job import Algorithm
from rljob_api.manifest.reward import Reward
from rljob_trainer.algorithms.advantages import compute_advantages
from rljob_trainer.episodes.prompts import Prompt
from rljob_trainer.episodes.types import TrainSample, Trajectory


@dataclass
class Group:
    """The trajectories of one prompt, in the order of `Trajectory.sample`."""

    index: int
    """Position within the step."""
    prompt: Prompt
    trajectories: list[Trajectory] = field(default_factory=list)


def weigh_score(trajectory: Trajectory, rewards: Sequence[Reward]) -> float | None:
    """Weighted sum of a trajectory's rewards; None when one of them is missing or invalid, or no float holds it."""
    total = 0.0
    for reward in rewards:
        result = trajectory.results.get(reward.name)
        if result is None or result.score is None:
            return None
        total += reward.weight * result.score
    return total if math.isfinite(total) else None


def usable_scores(group: Group, rewards: Sequence[Reward]) -> list[float | None]:
    """The group's scores, None for each sample that must not be trained on.  [samples]"""
    drops_group = {reward.name for reward in rewards if reward.failure_policy.action == "dropGroup"}
    for trajectory in group.trajectories:
        if any(not trajectory.results[name].valid for name in drops_group if name in trajectory.results):
            return [None] * len(group.trajectories)
    return [trajectory.score for trajectory in group.trajectories]


def build_samples(groups: Sequence[Group], rewards: Sequence[Reward], algorithm: Algorithm) -> list[TrainSample]:
    """Training samples of `groups` in their order; a masked one has no sampled tokens left."""
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
        )
        for group, group_scores, group_advantages in zip(groups, scores, advantages, strict=True)
        for trajectory, score, advantage in zip(group.trajectories, group_scores, group_advantages, strict=True)
    ]
