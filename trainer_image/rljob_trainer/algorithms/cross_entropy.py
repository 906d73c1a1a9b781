"""Cross-entropy on the tokens of given conversations: the loss of a warm start, whatever algorithm follows.

    loss_t = -log pi(y_t)                               mean over the update's tokens, as in TRL's SFTTrainer

No rollout has sampled these tokens: the caller passes the policy's own log-probs in place of the rollout's.
"""

from dataclasses import replace

import torch

from rljob_trainer.algorithms.base import LossInputs, PolicyLoss, Settings


class CrossEntropy:
    def __init__(self, settings: Settings) -> None:
        """`settings`: of the job's algorithm, whose corrections and entropy bonus do not apply."""
        correction = settings.algorithm.correction.model_copy(update={"type": "none", "rejection": None})
        changes = {"correction": correction, "entropy_coefficient": 0.0}
        self.settings = replace(settings, algorithm=settings.algorithm.model_copy(update=changes))

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        return PolicyLoss(-inputs.logprobs, torch.zeros_like(inputs.logprobs, dtype=torch.bool))
