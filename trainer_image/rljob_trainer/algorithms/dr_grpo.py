"""Dr. GRPO: GRPO done right (Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783).

    A_i    = R_i - mean(R)
    update = 1 / (episodes x maxTokens) x sum over all tokens of GRPO's loss_t

No deviation, so that easy and hard prompts weigh the same, and a constant divisor, so that a long wrong answer is not
punished less per token. Needs a group.
"""

from typing import ClassVar

from rljob_trainer.algorithms.base import Defaults
from rljob_trainer.algorithms.grpo import Grpo


class DrGrpo(Grpo):
    DEFAULTS: ClassVar[Defaults] = Defaults(level="constant", normalization="none")
