"""What an update reports about its tokens: sums and maxima over the micro-batches of a rank, then over the ranks.

The head reads the reports, and imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CriticMetrics:
    """Metrics of one update of the critic. Every rank has the same."""

    loss: float
    """Mean over the tokens that the loss saw, with the clip."""
    squared_error: float
    """Mean of (value - target)^2, without the clip."""
    clip_fraction: float
    """Share of tokens whose value was clipped."""
    grad_norm: float
    """Before clipping."""


@dataclass(frozen=True)
class RankMetrics:
    """Metrics of one update. Every rank has the same."""

    sums: dict[str, float]
    """By the names of algorithms.losses.SUMS; empty if no token was trained."""
    maxima: dict[str, float]
    """By the names of algorithms.losses.MAXIMA."""
    grad_norm: float
    learning_rate: float
    is_skipped: bool
    """Whether the gradient was not finite."""
    critic: CriticMetrics | None = None


class TokenMetrics:
    """Sums and maxima over the micro-batches of one rank, which are equally many on each rank."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> None:
        """Add the scalars of one micro-batch, with the same names each time."""
        for name, value in sums.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in maxima.items():
            value = value.detach().double()
            self._maxima[name] = self._maxima[name].maximum(value) if name in self._maxima else value

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return sums and maxima over all ranks; without a micro-batch, none. A collective."""
        return _reduce(self._sums, "SUM"), _reduce(self._maxima, "MAX")


def _reduce(values: dict[str, Tensor], name: str) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    if not values:
        return {}
    stacked, operation = torch.stack(list(values.values())), getattr(dist.ReduceOp, name)
    dist.all_reduce(stacked, operation)
    return dict(zip(values, stacked.tolist(), strict=True))
