"""How many executions may have just started. Pure: the caller passes the clock's time.

Functions that take microseconds need a processor each: more workers only take turns, each with its own memory (on two
processors, a server with 4 of them serves a sixth less than one with 2). Longer ones wait for something else, so all
slots may have one. Invariant: a free slot is held back for at most START_WINDOW_SECONDS.
"""

import os
from collections.abc import Iterable

START_WINDOW_SECONDS = 0.002
_STARTS_PER_SECOND = 2000
"""Starts of short executions: the limit grows with their length (Little's law). Below what a server can hand out;
otherwise a mean that is long only because too many workers take turns would admit them all."""
_STARTS_PER_PROCESSOR = 1
_NUM_PROCESSORS = len(os.sched_getaffinity(0))


def start_limit(mean_seconds: float, num_processors: int = _NUM_PROCESSORS) -> float:
    """Return how many executions may be started at once; `mean_seconds` is how long they took recently."""
    return max(_STARTS_PER_PROCESSOR * num_processors, mean_seconds * _STARTS_PER_SECOND)


def may_start(started_newest_first: Iterable[float], limit: float, now: float) -> bool:
    """Return whether one more execution may start."""
    for number, started in enumerate(started_newest_first, start=1):
        if now - started >= START_WINDOW_SECONDS:
            return True
        if number >= limit:
            return False
    return True
