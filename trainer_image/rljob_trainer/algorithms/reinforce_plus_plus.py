"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    G_t    = rewards from the token's turn on - kl.coefficient x sum of k1 from the token on
    A_t    = (G_t - mean(G)) / std(G)               over all tokens of the step
    loss_t = GRPO's

The baseline is the step's mean and not the group's, so a group with equal scores still teaches which prompts are easy;
the paper's variant with the group's mean is grpo with advantages.normalization: batch. Needs all groups of a step. The
paper has the KL penalty in the reward: kl.estimator k1.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from rljob_trainer.algorithms.advantages import Groups, is_signal
from rljob_trainer.algorithms.base import EpisodeAdvantages, EpisodeRewards, Floats
from rljob_trainer.algorithms.grpo import Grpo
from rljob_trainer.algorithms.kl import kl_returns
from rljob_trainer.algorithms.settings import Defaults
from rljob_trainer.algorithms.turn_credit import returns_to_go, rewards_of_turns, to_tokens


class ReinforcePlusPlus(Grpo):
    DEFAULTS: ClassVar[Defaults] = Defaults(normalization="batch")

    def advantages(self, groups: Groups) -> list[list[EpisodeAdvantages | None]]:
        returns = [[None if episode is None else self._returns(episode) for episode in group] for group in groups]
        every = [values for group in returns for values in group if values is not None]
        batch = np.concatenate([np.zeros(0), *every])
        largest = float(np.abs(batch).max(initial=0.0))
        scaled = batch / (largest or 1.0)  # squares of huge rewards are not finite
        mean, std = (largest * scaled.mean(), largest * scaled.std(ddof=1)) if len(batch) > 1 else (0.0, 0.0)
        divisor = std if is_signal(std, largest, self.settings.algorithm.zero_std_threshold) else math.inf
        return [
            [None if values is None else EpisodeAdvantages((values - mean) / divisor) for values in group]
            for group in returns
        ]

    def _returns(self, episode: EpisodeRewards) -> Floats:
        algorithm = self.settings.algorithm
        of_turns = returns_to_go(rewards_of_turns(episode), algorithm.turn_rewards.discount)
        returns = to_tokens(of_turns, episode.turn_of_token)
        return returns - algorithm.kl.coefficient * kl_returns(episode) if self.settings.kl_in_reward else returns
