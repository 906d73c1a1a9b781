"""Probability ratios and PPO's clipped objective. All [tokens]. Imports no torch, so that the driver need not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +- this before exp: e^20 is 5e8, so sums of such ratios stay finite in fp32. A token beyond
it has no gradient from its ratio."""


def exp_clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Limit to [1 - low, 1 + high]; None: no limit on that side."""
    if low is None and high is None:
        return ratio
    return ratio.clamp(None if low is None else 1 - low, None if high is None else 1 + high)


def clipped_objective(
    ratio: Tensor, advantages: Tensor, low: float | None, high: float | None, dual: float | None = None
) -> tuple[Tensor, Tensor]:  # [tokens], [tokens] bool
    """Return PPO's pessimistic surrogate as a loss, and where clipping removed the gradient.

    The surrogate of a negative advantage has no bound: the larger the ratio, the larger the loss and its gradient.
    `dual` ends it at this ratio (dual-clip PPO, Ye et al., arXiv:1912.09729). None: no bound.
    """
    unclipped, clipped = -advantages * ratio, -advantages * clip(ratio, low, high)
    loss, is_clipped = unclipped.maximum(clipped), clipped > unclipped
    if dual is None:
        return loss, is_clipped
    bound = -advantages * dual
    is_beyond = (advantages < 0) & (loss > bound)
    return loss.where(~is_beyond, bound), is_clipped | is_beyond


def sum_by_row(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the sum over each row's tokens.  [tokens] -> [rows]"""
    return values.new_zeros(num_rows).index_add(0, rows, values)


def mean_by_row(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the mean over each row's tokens.  [tokens] -> [rows]; 0 for a row without tokens"""
    counts = sum_by_row(values.new_ones(len(values)), rows, num_rows)
    return sum_by_row(values, rows, num_rows) / counts.clamp(min=1)
