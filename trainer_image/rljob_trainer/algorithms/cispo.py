"""CISPO: Clipped IS-weight Policy Optimization (MiniMax-M1 2025, arXiv:2506.13585).

    loss_t = -stop_gradient(clip(r_t, 0, 1 + high)) A_i log pi(y_t)

The weight is clipped and not the objective: each token keeps its gradient, even a rare one whose ratio is large, such
as "however" or "wait". No lower bound; the upper one is 5, as in ScaleRL (arXiv:2510.13786). Mean over all tokens of
the update. Needs a group.
"""

from typing import ClassVar

from rljob_trainer.algorithms.base import Defaults, LossInputs, PolicyLoss
from rljob_trainer.algorithms.clipping import clip, exp_clamped
from rljob_trainer.algorithms.grpo import Grpo


class Cispo(Grpo):
    DEFAULTS: ClassVar[Defaults] = Defaults(clip_low=None, clip_high=4.0, dual_clip=None)

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        ratio = exp_clamped(inputs.logprobs.detach() - inputs.proximal_logprobs)
        weight = clip(ratio, self.settings.clip_low, self.settings.clip_high)
        return PolicyLoss(-weight * inputs.advantages * inputs.logprobs, weight != ratio)
