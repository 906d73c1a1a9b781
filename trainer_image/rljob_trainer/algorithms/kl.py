"""The KL penalty against the reference model: in the loss (k2, k3), or in the reward (k1).

    d = log reference - log policy      k1 = -d      k2 = d^2 / 2      k3 = e^d - 1 - d      (Schulman, kl-approx 2020)

k1 as a loss has the gradient of log policy, whose mean is zero: it does not regularize. As a reward it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from rljob_trainer.algorithms.base import EpisodeRewards, Floats
from rljob_trainer.algorithms.clipping import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:  # [tokens]
    """Estimate KL(policy || reference) from samples of the policy. k3 is finite for any log-probs, and has no gradient
    where it is clamped."""
    difference = reference - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    difference = difference.clamp(max=MAX_LOG_RATIO)
    return difference.expm1() - difference


def kl_returns(episode: EpisodeRewards) -> Floats:
    """Return the sum of k1 from each token to the episode's end.  [sampled]"""
    if episode.reference_kl is None:
        raise ValueError("a KL penalty in the reward needs log-probs of the reference model")
    return np.cumsum(episode.reference_kl[::-1])[::-1]
