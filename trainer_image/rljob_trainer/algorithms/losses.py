"""The loss of an update: the algorithm's policy loss, corrected and weighted, the KL penalty and the entropy bonus.

    loss = sum over tokens of weight x (correction x policy loss + kl coefficient x kl - entropy coefficient x entropy)

Invariant: a sum over tokens whose weights are fixed beforehand. So the sums over micro-batches and ranks, divided by
the update's denominator, are the loss and the gradient of the whole update.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.algorithms.base import AlgorithmCode, LossInputs
from rljob_trainer.algorithms.corrections import correct, importance_weights
from rljob_trainer.algorithms.kl import kl_estimate

SUMS = (
    "num_tokens",
    "loss",
    "policy_loss",
    "kl",
    "entropy",
    "clipped",
    "logprob_difference",
    "mismatch_kl",
    "corrected",
    "rejected",
    "importance",
    "squared_importance",
)
MAXIMA = ("mismatch_max",)


@dataclass(frozen=True)
class LossTerms:
    loss: Tensor
    """Scalar with the gradient."""
    sums: dict[str, Tensor]
    """By the names of SUMS, in fp64. loss and policy_loss are weighted sums, to be divided by the denominator; the
    others are over the tokens that count (weight > 0), to be divided by num_tokens. The effective sample size is
    importance^2 / squared_importance: always of the tokens' own weights, so that it measures the rollouts and not the
    settings of the correction."""
    maxima: dict[str, Tensor]
    """By the names of MAXIMA, over the same tokens; 0 without any."""


def update_loss(
    algorithm: AlgorithmCode,
    inputs: LossInputs,
    *,
    weights: Tensor,  # [tokens] share of the token, before the division by the denominator; 0 for padding
    entropy: Tensor | None = None,  # [tokens] with gradient only where the coefficient needs it
    reference_logprobs: Tensor | None = None,  # [tokens]
) -> LossTerms:
    """Return the loss of one micro-batch, and what the update reports about its tokens."""
    spec = algorithm.settings.algorithm
    importance = importance_weights(inputs.proximal_logprobs, inputs.rollout_logprobs)
    correction = correct(inputs, spec)
    policy = algorithm.loss(inputs)
    policy_loss = (weights * correction.weights * policy.per_token).sum()
    loss = policy_loss
    kl = torch.zeros_like(inputs.rollout_logprobs)
    if reference_logprobs is not None:
        kl = kl_estimate(inputs.logprobs, reference_logprobs, spec.kl.estimator)
        if not algorithm.settings.kl_in_reward:
            loss = loss + spec.kl.coefficient * (weights * kl).sum()
    if entropy is not None and spec.entropy_coefficient:
        loss = loss - spec.entropy_coefficient * (weights * entropy).sum()
    difference = inputs.logprobs.detach() - inputs.rollout_logprobs
    per_token = {
        "kl": kl,
        "entropy": torch.zeros_like(kl) if entropy is None else entropy,
        "clipped": policy.clipped,
        "logprob_difference": difference.abs(),
        "mismatch_kl": kl_estimate(inputs.rollout_logprobs, inputs.logprobs.detach(), "k3"),
        "corrected": correction.changed,
        "rejected": correction.rejected,
        "importance": importance,
        "squared_importance": importance.double().square(),
    }
    counted = weights > 0
    sums = {"num_tokens": counted.sum(), "loss": loss, "policy_loss": policy_loss}
    sums |= {name: values[counted].double().sum() for name, values in per_token.items()}
    largest = torch.cat([difference[counted].abs(), difference.new_zeros(1)]).max()
    return LossTerms(
        loss, {name: sums[name].detach().double() for name in SUMS}, {"mismatch_max": largest.detach().double()}
    )
