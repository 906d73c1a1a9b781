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
    ratio: Tensor, advantages: Tensor, low: float | None, high: float | None
) -> tuple[Tensor, Tensor]:  # [tokens], [tokens] bool
    """Return PPO's pessimistic surrogate as a loss, and where clipping removed the gradient."""
    unclipped, clipped = -advantages * ratio, -advantages * clip(ratio, low, high)
    return unclipped.maximum(clipped), clipped > unclipped


def mean_by_row(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the mean over each row's tokens.  [tokens] -> [rows]; 0 for a row without tokens"""
    sums = values.new_zeros(num_rows).index_add(0, rows, values)
    counts = values.new_zeros(num_rows).index_add(0, rows, values.new_ones(len(values)))
    return sums / counts.clamp(min=1)
