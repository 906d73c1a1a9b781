"""Which source the next prompt comes from. Pure.

Weights are met by counting, and not by drawing: the source that is furthest behind its share comes next. Independent
draws, as torch's WeightedRandomSampler makes them, differ from the weights by about sqrt(n) after n prompts. Here no
source is ever ahead of its share by one prompt or more, and none is behind by as many as there are other sources.

Why: before each choice the shares of the next prompt are added to what each source is owed, so the sum of all debts is
1, and the largest is above 0. The chosen source then gets 1 prompt, which leaves it owed more than -1. The others are
owed more than -1, too, and the sum is 0 again, so each debt is below the number of the other sources.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose_source(weights: Sequence[float], drawn: Sequence[int]) -> int:
    """Return the number of the source of the next prompt; of equal ones, the first. `drawn`: prompts of each so far."""
    total, weight = sum(drawn) + 1, sum(weights)
    return max(range(len(weights)), key=lambda source: total * weights[source] / weight - drawn[source])
