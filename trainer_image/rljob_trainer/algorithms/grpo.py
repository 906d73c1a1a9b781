"""GRPO: Group Relative Policy Optimization (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300).

    A_i    = (R_i - mean(R)) / std(R)                       R: rewards of the group
    loss_t = -min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i)        r_t = pi(y_t) / pi_prox(y_t)

Needs a group, and neither a critic nor a reference model (unless kl.coefficient is set). The paper averages over
sequences (loss.level: sequence).
"""

from typing import ClassVar

from rljob_trainer.algorithms.advantages import Groups, group_advantages
from rljob_trainer.algorithms.base import Defaults, EpisodeAdvantages, LossInputs, Needs, PolicyLoss, Settings
from rljob_trainer.algorithms.clipping import clipped_objective, exp_clamped


class Grpo:
    DEFAULTS: ClassVar[Defaults] = Defaults()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.needs = Needs(reference=settings.kl_in_reward, whole_step=settings.needs_whole_step)

    def advantages(self, groups: Groups) -> list[list[EpisodeAdvantages | None]]:
        return group_advantages(groups, self.settings)

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        ratio = exp_clamped(inputs.logprobs - inputs.proximal_logprobs)
        settings = self.settings
        bounds = settings.clip_low, settings.clip_high, settings.dual_clip
        return PolicyLoss(*clipped_objective(ratio, inputs.advantages, *bounds))
