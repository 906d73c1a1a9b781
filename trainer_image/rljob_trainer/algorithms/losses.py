"""The loss of an update: the algorithm's policy loss, corrected and weighted, the KL penalty and the entropy bonus.

    loss = sum over tokens of weight x (correction x policy loss + kl coefficient x kl - entropy coefficient x entropy)

Invariant: a sum over tokens whose weights are fixed beforehand. So the sums over micro-batches and ranks, divided by
the update's denominator, are the loss and the gradient of the whole update.

Corrections are for tokens whose probabilities the rollout computed differently: weights that follow from the
difference, and which tokens are left out. All [tokens]; no gradient.

    mu      the rollout's policy: other kernels, and perhaps older weights
    prox    the proximal policy, to which clipping refers
    pi      the policy now

The loss of a token is weighted by prox / mu, truncated or masked (decoupled PPO, Hilton et al., arXiv:2110.00641;
truncation as in IMPALA, arXiv:1802.01561), and the ratio that is clipped is pi / prox. A sequence's weight is the
product of its tokens' weights, or their geometric mean. A sequence is a row: an episode whose context is rewritten has
several, which may be on different ranks. Nothing here computes prox by a forward pass: its log-probs are interpolated
by the ages of the weights (prox_logp_method: loglinear of AReaL).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rljob_api.manifest.algorithm import Algorithm, Correction, RatioLevel, Rejection
from rljob_trainer.algorithms.base import AlgorithmCode, LossInputs, PolicyLoss
from rljob_trainer.algorithms.clipping import exp_clamped, mean_by_row, sum_by_row
from rljob_trainer.algorithms.kl import kl_estimate

if TYPE_CHECKING:
    from torch import Tensor


def loglinear_proximal(logprobs: Tensor, rollout_logprobs: Tensor, shares: Tensor) -> Tensor:
    """Return the proximal policy's log-probs: exactly mu with share 0, and pi with share 1."""
    return rollout_logprobs.lerp(logprobs.detach(), shares)


def importance_weights(proximal: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return each token's prox / mu, before truncation."""
    return exp_clamped(proximal.detach() - rollout_logprobs)


@dataclass(frozen=True)
class Corrected:
    """The tokens of a micro-batch. All [tokens]; no gradient."""

    weights: Tensor
    """Factor of the policy loss; 0 where a token is left out."""
    changed: Tensor
    """bool: where the weight is truncated or masked."""
    rejected: Tensor
    """bool: where the token is left out whatever its weight."""


def correct(inputs: LossInputs, algorithm: Algorithm) -> Corrected:
    """Return what algorithm.correction does to each token's loss."""
    settings = algorithm.correction
    weights, changed = _bound(_ratio_at(settings.level, inputs.proximal_logprobs, inputs), settings)
    rejected = changed.new_zeros(changed.shape) if settings.rejection is None else _reject(inputs, settings.rejection)
    return Corrected(weights.masked_fill(rejected, 0), changed, rejected)


def _bound(importance: Tensor, settings: Correction) -> tuple[Tensor, Tensor]:  # [tokens], [tokens] bool
    if settings.type == "none":
        return importance.new_ones(importance.shape), importance < 0
    if settings.type == "truncate":
        return importance.clamp(max=settings.cap), importance > settings.cap
    masked = (importance > settings.cap) | (importance < settings.floor)
    return importance.masked_fill(masked, 0), masked


def _reject(inputs: LossInputs, settings: Rejection) -> Tensor:
    """Return where pi / mu is out of bounds. prox / mu would not do: in later updates of a step it is 1, whatever the
    rollout computed."""
    ratio = _ratio_at(settings.level, inputs.logprobs, inputs)
    return (ratio > settings.cap) | (ratio < settings.smallest)


def _ratio_at(level: RatioLevel, logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """Return each token's probability over mu's, or for all tokens of a row their product or geometric mean."""
    log_ratios = logprobs.detach() - inputs.rollout_logprobs
    if level == "sequence":
        log_ratios = sum_by_row(log_ratios, inputs.rows, inputs.num_rows)[inputs.rows]
    elif level == "geometric":
        log_ratios = mean_by_row(log_ratios, inputs.rows, inputs.num_rows)[inputs.rows]
    return exp_clamped(log_ratios)


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
    top: tuple[Tensor, Tensor] | None = None,  # [tokens, teachers, k] log-probs of the policy and of the teachers
    is_given: bool = False,
) -> LossTerms:
    """Return the loss of one micro-batch, and what the update reports about its tokens. `is_given`: they are of given
    conversations, so that the loss is the cross-entropy, -log pi, without an entropy bonus. No
    rollout sampled them: the log-probs in `inputs` are all those of the policy, and no correction changes anything."""
    spec = algorithm.settings.algorithm
    importance = importance_weights(inputs.proximal_logprobs, inputs.rollout_logprobs)
    correction = correct(inputs, spec)
    policy = PolicyLoss(-inputs.logprobs, correction.changed) if is_given else algorithm.loss(inputs)
    policy_loss = (weights * correction.weights * policy.per_token).sum()
    loss = policy_loss
    kl = torch.zeros_like(inputs.rollout_logprobs)
    if reference_logprobs is not None:
        kl = kl_estimate(inputs.logprobs, reference_logprobs, spec.kl.estimator)
        if not algorithm.settings.kl_in_reward:
            loss = loss + spec.kl.coefficient * (weights * kl).sum()
    if entropy is not None and spec.entropy_coefficient and not is_given:
        loss = loss - spec.entropy_coefficient * (weights * entropy).sum()
    if top is not None:  # the terms of KL(teacher || policy) of the likeliest tokens
        teachers = top[1]
        divergences = (teachers.exp() * (teachers - top[0])).sum(-1)
        for reward, values in zip(algorithm.settings.top_teachers, divergences.unbind(1), strict=True):
            assert reward.teacher, "topK is a field of it"
            limit = reward.teacher.clip
            loss = loss + reward.weight * (weights * values.clamp(-limit, limit)).sum()
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
    others = weights <= 0  # a mask: to select the tokens that count, the host would have to wait for their number
    sums = {"num_tokens": (~others).sum(), "loss": loss, "policy_loss": policy_loss}
    sums |= {name: values.double().masked_fill(others, 0).sum() for name, values in per_token.items()}
    largest = torch.cat([difference.abs().masked_fill(others, 0), difference.new_zeros(1)]).max()
    return LossTerms(
        loss, {name: sums[name].detach().double() for name in SUMS}, {"mismatch_max": largest.detach().double()}
    )
