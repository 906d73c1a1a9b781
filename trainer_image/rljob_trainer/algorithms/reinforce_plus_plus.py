"""REINFORCE++ and its variant with a baseline (Hu et al. 2025, arXiv:2501.03262).

    REINFORCE++     G_t = rewards from the token's turn on - kl.coefficient x sum of k1 from the token on
    with baseline   G_t = R - mean(R) of the group
    both            A_t = (G_t - mean(G)) / std(G)               over all tokens of the step
                    loss_t = GRPO's

Without the baseline, a group with equal scores still teaches which prompts are easy. With it, the deviation is that of
the centered rewards, to which differences between prompts do not add. (grpo with advantages.normalization: batch
divides by the deviation of the rewards as they are.) Both need all groups of a step. The paper has the KL penalty in
the reward (kl.estimator k1) without the baseline, and in the loss (k2) with it.
"""

import dataclasses
from typing import ClassVar

from rljob_trainer.algorithms.advantages import (
    Groups,
    group_advantages,
    returns_to_go,
    rewards_of_turns,
    to_tokens,
    whiten,
)
from rljob_trainer.algorithms.base import Defaults, EpisodeAdvantages, EpisodeRewards, Floats, Settings
from rljob_trainer.algorithms.grpo import Grpo
from rljob_trainer.algorithms.kl import kl_returns


class ReinforcePlusPlus(Grpo):
    DEFAULTS: ClassVar[Defaults] = Defaults(normalization="batch")

    def advantages(self, groups: Groups) -> list[list[EpisodeAdvantages | None]]:
        returns = [
            [None if episode is None else EpisodeAdvantages(self._returns(episode)) for episode in group]
            for group in groups
        ]
        return whiten(returns, self.settings.algorithm.zero_std_threshold)

    def _returns(self, episode: EpisodeRewards) -> Floats:
        algorithm = self.settings.algorithm
        of_turns = returns_to_go(rewards_of_turns(episode), algorithm.turn_rewards.discount)
        returns = to_tokens(of_turns, episode.turn_of_token)
        return returns - algorithm.kl.coefficient * kl_returns(episode) if self.settings.kl_in_reward else returns


class ReinforcePlusPlusBaseline(Grpo):
    DEFAULTS: ClassVar[Defaults] = Defaults(normalization="batch")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._centering = dataclasses.replace(self.settings, normalization="none")

    def advantages(self, groups: Groups) -> list[list[EpisodeAdvantages | None]]:
        return whiten(group_advantages(groups, self._centering))
