"""GSPO: Group Sequence Policy Optimization (Zheng et al. 2025, arXiv:2507.18071).

    s      = exp(mean over the row's tokens of log pi / pi_prox)
    loss_t = -min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t)        s_t = s, with the gradient of token t alone

One ratio for each sequence, as the reward is given to sequences: it is steadier for mixtures of experts. It is the
paper's GSPO-token, which equals GSPO where all tokens have the same advantage, and allows others. Mean over sequences.
Its clip range is 1,000 times smaller than GRPO's, since a mean of many log ratios is near 0. Needs a group.
"""

from typing import ClassVar

from rljob_trainer.algorithms.base import Defaults, LossInputs, PolicyLoss
from rljob_trainer.algorithms.clipping import clipped_objective, exp_clamped, mean_by_row
from rljob_trainer.algorithms.grpo import Grpo


class Gspo(Grpo):
    DEFAULTS: ClassVar[Defaults] = Defaults(
        clip_low=3e-4, clip_high=4e-4, dual_clip=None, level="sequence", clips_stale_tokens=False
    )

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        fixed = inputs.logprobs.detach()
        of_rows = mean_by_row(fixed - inputs.proximal_logprobs, inputs.rows, inputs.num_rows)
        ratio = exp_clamped(of_rows)[inputs.rows] * (inputs.logprobs - fixed).exp()
        settings = self.settings
        bounds = settings.clip_low, settings.clip_high, settings.dual_clip
        return PolicyLoss(*clipped_objective(ratio, inputs.advantages, *bounds))
