"""What several answers to each prompt say about a policy: avg@n, pass@k and maj@n, with confidence intervals. Pure.

The unit is the prompt: a figure is the mean over prompts, and its interval is about other prompts of the same kind.
Prompts without a counted answer are in no figure.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rljob_trainer.algorithms.advantages import average, deviation

_Z: Final = 1.959963984540054
"""Quantile of the normal distribution for 95 %."""


@dataclass(frozen=True)
class Answer:
    """One counted answer to a prompt."""

    value: float
    """Its accuracy; 0 if the agent failed."""
    text: str | None = None
    """What it answers, for the vote. None: nothing that could be read."""


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float | None
    """Lower bound of the 95 % confidence interval. None: unknown, with one prompt or equal values without
    bounds."""
    high: float | None


def estimate_mean(prompts: Sequence[Sequence[Answer]]) -> Estimate | None:
    """Return avg@n; None without an answer.  [prompts][answers]"""
    return _estimate([average([answer.value for answer in answers]) for answers in prompts if answers])


def estimate_pass(prompts: Sequence[Sequence[Answer]], k: int, threshold: float) -> Estimate | None:
    """Return pass@k over the prompts with at least `k` answers; None if there is none. An answer of at least
    `threshold` solves its prompt.  [prompts][answers]"""
    counts = ((len(answers), sum(answer.value >= threshold for answer in answers)) for answers in prompts)
    return _estimate([pass_at(count, solved, k) for count, solved in counts if count >= k])


def estimate_majority(prompts: Sequence[Sequence[Answer]]) -> Estimate | None:
    """Return maj@n; None if no answer has a text.  [prompts][answers]"""
    if all(answer.text is None for answers in prompts for answer in answers):
        return None
    return _estimate([majority(answers) for answers in prompts if answers])


def pass_at(num_answers: int, num_solved: int, k: int) -> float:
    """Return the probability that `k` of the answers, drawn without replacement, have one that solves the prompt:
    1 - C(n - c, k) / C(n, k), as a product (Chen et al. 2021, arXiv:2107.03374).

    It is an unbiased estimate of 1 - (1 - p)^k; to put the share of solved answers for p is too high or too low.
    """
    assert 0 <= num_solved <= num_answers
    assert 1 <= k <= num_answers
    if num_answers - num_solved < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_answers - num_solved + 1, num_answers + 1))


def majority(answers: Sequence[Answer]) -> float:
    """Return the mean accuracy of the answers with the most frequent text. Between texts that are equally frequent it
    is the mean over them: what a vote that draws one of them gives on average. 0 if none of them has a text."""
    values = defaultdict(list)
    for answer in answers:
        if answer.text is not None:
            values[answer.text].append(answer.value)
    most = max(map(len, values.values()), default=0)
    return average([average(found) for found in values.values() if len(found) == most] or [0.0])


def _estimate(values: Sequence[float]) -> Estimate | None:  # [prompts]
    """Return the mean with its interval: the score interval of a share (Wilson 1927) if each value is 0 or 1, since the
    normal one has no width at 0 and 1; else the standard error over prompts (Miller 2024, arXiv:2411.00640), which
    counts the answers to a prompt as the cluster that they are. Of equal values between 0 and 1 it has no width either:
    their interval is that of a share, whose values vary most."""
    if not values:
        return None
    mean, is_share = average(values), all(0 <= value <= 1 for value in values)
    if set(values) <= {0.0, 1.0} or (is_share and len(set(values)) == 1 < len(values)):
        return Estimate(mean, *_wilson(mean, len(values)))
    if len(set(values)) == 1:
        return Estimate(mean, None, None)
    margin = _Z * deviation(values) / math.sqrt(len(values))
    low, high = mean - margin, mean + margin
    if is_share:
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(mean, low, high)


def _wilson(share: float, count: int) -> tuple[float, float]:
    ratio = _Z**2 / count
    center = (share + ratio / 2) / (1 + ratio)
    margin = math.sqrt(ratio * share * (1 - share) + ratio**2 / 4) / (1 + ratio)
    # The formula's bounds at 0 and 1 are exact but for rounding.
    return (0.0 if share == 0 else center - margin), (1.0 if share == 1 else center + margin)
