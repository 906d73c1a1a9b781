"""DAPO: Decoupled Clip and Dynamic Sampling Policy Optimization (Yu et al. 2025, arXiv:2503.14476).

GRPO with four changes:
    clip-higher         clip(r, 0.8, 1.28): unlikely tokens may become likely, so entropy does not collapse
    dynamic sampling    groups with equal scores are replaced (driver; algorithm.dynamicSampling)
    token mean          over all tokens of the update, so that long answers count by their tokens
    overlong shaping    score + min(0, (limit - buffer - length) / buffer) x penalty (algorithms.rows)

The paper's limit is 20,480 tokens with a buffer of 4,096: a fifth. No KL penalty. The dual clip of 10 is that of the
recipe that its authors published in verl. Needs a group.
"""

from typing import ClassVar

from rljob_trainer.algorithms.base import Defaults
from rljob_trainer.algorithms.grpo import Grpo


class Dapo(Grpo):
    DEFAULTS: ClassVar[Defaults] = Defaults(clip_high=0.28, dual_clip=10.0, truncated="shape", replaces_groups=True)
