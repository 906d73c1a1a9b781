"""The loss of a GRPO update, term by term, over a flat list of sampled tokens.

Invariant: the loss is a weighted sum over tokens, whose weights are fixed for the whole mini-batch beforehand. So the
sum over micro-batches and ranks is the loss and the gradient of the mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rljob_api.manifest.algorithm import Algorithm


@dataclass(frozen=True)
class TokenBatch:
    """What the loss reads from each sampled token. All [tokens]."""

    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    """None: the current log-probs, so that every ratio is 1."""
    weights: Tensor
    """The token's share in the mini-batch's loss; 0 for padding."""


@dataclass(frozen=True)
class LossTerms:
    """`loss` carries the gradient; the rest are sums over the tokens that count (weight > 0), to be averaged later."""

    loss: Tensor
    sums: Tensor
    """[len(SUMS)]"""


SUMS = ("loss", "policy_loss", "kl", "entropy", "clipped", "logprob_difference")


def clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:  # [tokens], [tokens] bool
    """Return PPO's pessimistic surrogate as a loss, and where clipping removed the gradient."""
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    unclipped, clipped = -advantages * ratio, -advantages * clipped_ratio
    return torch.maximum(unclipped, clipped), clipped > unclipped


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:  # [tokens]
    """Estimate KL(policy || reference) from samples of the policy, with one of Schulman's estimators."""
    difference = reference - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(difference) - difference


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float | None) -> Tensor:  # [tokens]
    """Return truncated importance weights that correct for the rollout engine's arithmetic. No gradient."""
    if cap is None:
        return torch.ones_like(rollout_logprobs)
    return (old_logprobs.detach() - rollout_logprobs).exp().clamp(max=cap)


def grpo_loss(
    logprobs: Tensor,  # [tokens] with gradient
    entropy: Tensor,  # [tokens] with gradient only where the coefficient needs it
    reference: Tensor | None,  # [tokens]
    batch: TokenBatch,
    algorithm: Algorithm,
) -> LossTerms:
    """Return the weighted sum of the clipped objective, the KL penalty and the entropy bonus."""
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    objective, clipped = clipped_objective(
        (logprobs - old).exp(), batch.advantages, algorithm.clip_low, algorithm.clip_high
    )
    correction = importance_weights(old, batch.rollout_logprobs, algorithm.importance_cap)
    policy_loss = (batch.weights * correction * objective).sum()
    loss, kl = policy_loss, torch.zeros_like(logprobs)
    if reference is not None:
        kl = kl_estimate(logprobs, reference, algorithm.kl.estimator)
        loss = loss + algorithm.kl.coefficient * (batch.weights * kl).sum()
    if algorithm.entropy_coefficient:
        loss = loss - algorithm.entropy_coefficient * (batch.weights * entropy).sum()
    counted = (batch.weights > 0).to(logprobs.dtype)
    per_token = torch.stack([kl, entropy, clipped.to(kl.dtype), (logprobs - batch.rollout_logprobs).abs()])
    sums = torch.cat([torch.stack([loss, policy_loss]), (per_token * counted).sum(dim=1)])
    return LossTerms(loss, sums.detach().double())
