"""Corrections for tokens whose probabilities the rollout computed differently. All [tokens]; no gradient.

    mu      the rollout's policy: other kernels, and perhaps older weights
    prox    the proximal policy, to which clipping refers
    pi      the policy now

The loss of a token is weighted by prox / mu, truncated or masked (decoupled PPO, Hilton et al., arXiv:2110.00641;
truncation as in IMPALA, arXiv:1802.01561), and the ratio that is clipped is pi / prox. Nothing here computes prox by a
forward pass: its log-probs are interpolated by the ages of the weights (AReaL's loglinear rule, arXiv:2505.24298).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.algorithm import Algorithm
from rljob_trainer.algorithms.clipping import exp_clamped

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
    """Return prox / mu, before truncation."""
    return exp_clamped(proximal.detach() - rollout_logprobs)


def correct(importance: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:  # [tokens], [tokens] bool
    """Return each token's weight in the loss, and where it is truncated or masked."""
    kind, correction = algorithm.correction.type, algorithm.correction
    cap = correction.cap if algorithm.importance_cap is None else algorithm.importance_cap
    if kind == "none":
        return importance.new_ones(importance.shape), importance < 0
    if kind == "truncate":
        return importance.clamp(max=cap), importance > cap
    masked = (importance > cap) | (importance < correction.floor)
    return importance.masked_fill(masked, 0), masked
