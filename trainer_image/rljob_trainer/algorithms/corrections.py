"""Corrections for tokens whose probabilities the rollout computed differently. All [tokens]; no gradient.

Owns the weights that follow from the difference, and which tokens are left out. The loss applies them.

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

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.algorithm import Algorithm, Correction, RatioLevel, Rejection
from rljob_trainer.algorithms.base import LossInputs
from rljob_trainer.algorithms.clipping import exp_clamped, mean_by_row, sum_by_row

if TYPE_CHECKING:
    from torch import Tensor


def proximal_shares(versions: NDArray[np.int32], proximal: float, current: float, end: float) -> NDArray[np.float32]:
    """Return how much of pi is in prox, for tokens that weights of `versions` sampled.  [tokens], 0 to 1

    1 where the current weights sampled the token: prox is pi, the ratio is 1, and the correction is pi / mu. 0 where
    the weights at the start of the step did, and updates followed: prox is mu, as in PPO with the rollout's log-probs.
    Where older weights did, prox is `proximal` on the way from them to `end`, the policy that the step works towards:
    AReaL's rule. The ratio then is a part of pi / mu also in the first update, so clipping ends what stale tokens would
    otherwise push on with each step until newer ones arrive. With `current` as the end, the ratio of these is 1, too.
    """
    age = np.where(versions < proximal, end, current) - versions
    shares = np.divide(proximal - versions, age, out=np.ones(len(versions)), where=age > 0)
    return shares.astype(np.float32)


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
