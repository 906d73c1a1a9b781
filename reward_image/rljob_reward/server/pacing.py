"""How many executions may have just begun. Pure: the clock is the caller's.

A function that takes microseconds is done in the order in which this server can hand out requests. More workers than
that needs take turns on the same few processors, with all of each one's memory: on two, 16 of them execute a fifth less
than 4. Longer executions wait for something else, and all slots may have one. Invariant: a free slot is held back for
BEGINNING_SECONDS at most.
"""

from __future__ import annotations

import os
from collections.abc import Hashable

BEGINNING_SECONDS = 0.002
_STARTS_A_SECOND = 2000
"""Of short executions, by which the limit grows with their length (Little's law). Below what a server can hand out, so
that a mean that is long because too many take turns does not keep them all."""
_A_PROCESSOR = 2


class Pacing:
    """The executions that have just begun."""

    def __init__(self, num_processors: int | None = None) -> None:
        self._fewest = _A_PROCESSOR * (num_processors or len(os.sched_getaffinity(0)))
        self._begun: dict[Hashable, float] = {}
        """When each began, the oldest first; perhaps some that are older by now."""

    def begin(self, execution: Hashable, now: float) -> None:
        self._begun[execution] = now

    def end(self, execution: Hashable) -> None:
        self._begun.pop(execution, None)

    def has_room(self, mean_seconds: float, now: float) -> bool:
        """Whether one more may begin; `mean_seconds` is what executions take of late."""
        while self._begun and now - next(iter(self._begun.values())) >= BEGINNING_SECONDS:
            del self._begun[next(iter(self._begun))]
        return len(self._begun) < max(self._fewest, mean_seconds * _STARTS_A_SECOND)
