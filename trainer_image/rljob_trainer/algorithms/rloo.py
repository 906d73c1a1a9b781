"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740).

    A_i    = R_i - mean of R_j over the other members of the group
    loss_t = -r_t A_i               without clipping; r_t is 1 in an update with current weights
    update = sum over tokens / (episodes x maxTokens): a whole answer is one action, up to the constant maxTokens

The baseline does not depend on the episode itself, so the gradient is unbiased. The paper subtracts the KL penalty from
the reward: kl.estimator k1. Needs a group.
"""

from typing import ClassVar

from rljob_trainer.algorithms.advantages import Groups, group_advantages
from rljob_trainer.algorithms.base import Defaults, EpisodeAdvantages
from rljob_trainer.algorithms.grpo import Grpo


class Rloo(Grpo):
    DEFAULTS: ClassVar[Defaults] = Defaults(
        clip_low=None, clip_high=None, dual_clip=None, level="constant", normalization="none"
    )

    def advantages(self, groups: Groups) -> list[list[EpisodeAdvantages | None]]:
        return group_advantages(groups, self.settings, leave_one_out=True)
