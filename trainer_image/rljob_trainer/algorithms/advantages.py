"""Scores to advantages: GRPO's centring by group, and its normalization. Pure.

A score of None is a masked sample: it enters no mean, deviation or count, and its advantage is 0. The valid samples
get exactly the advantages that they would have without the masked ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

_STD_EPSILON = 1e-6


def compute_advantages(
    groups: Sequence[Sequence[float | None]],
    *,
    normalization: Literal["group", "batch", "none"],
    zero_std_threshold: float,
) -> list[list[float]]:
    """Return the advantages of each group's samples.  [groups][samples] -> [groups][samples]"""
    batch_std = deviation([score for group in groups for score in group if score is not None])
    advantages = []
    for group in groups:
        valid = [score for score in group if score is not None]
        std = deviation(valid)
        if not has_signal(group, zero_std_threshold):
            advantages.append([0.0] * len(group))
            continue
        mean = average(valid)
        divisor = {"group": std, "batch": batch_std, "none": 1.0 - _STD_EPSILON}[normalization] + _STD_EPSILON
        advantages.append([0.0 if score is None else (score - mean) / divisor for score in group])
    return advantages


def has_signal(group: Sequence[float | None], zero_std_threshold: float) -> bool:
    """Return whether a group's valid scores differ by more than float noise.

    Noise of 1e-7 over an epsilon of 1e-6 would become an advantage of 0.1: hence a threshold and not `std == 0`.
    """
    valid = [score for score in group if score is not None]
    return len(valid) >= 2 and deviation(valid) > zero_std_threshold


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1) in any order (fsum); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = average(values)
    differences = [value - mean for value in values]
    try:
        return math.sqrt(math.fsum(difference**2 for difference in differences) / (len(values) - 1))
    except OverflowError:  # one sample of 1e200 must not end a job
        scale = max(map(abs, differences))
        return scale * math.sqrt(math.fsum((difference / scale) ** 2 for difference in differences) / (len(values) - 1))


def average(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # a sum beyond all floats, or of both infinities
        return sum(value / len(values) for value in values)
