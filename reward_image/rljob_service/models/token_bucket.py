"""A token bucket for a rate per minute. Pure: the caller passes the time.

Invariants at a constant rate: no window of 60 seconds admits more than the rate, and every request is admitted
eventually. The bucket starts empty, because a predecessor may have used the last minute's amount.
"""

import math

_BURST_FRACTION = 0.1
"""Fraction of a minute's amount that may be taken at once."""
_MINUTE_SECONDS = 60.0


class TokenBucket:
    """Holds at least `max_take`, the largest amount that is taken at once."""

    def __init__(self, per_minute: float, max_take: float, now: float) -> None:
        self._max_take = max_take
        self._level = 0.0
        self._updated_at = now
        self._capacity = self._per_second = 0.0
        self.set_rate(per_minute, now)

    def set_rate(self, per_minute: float, now: float) -> None:
        """Change the rate and keep the level, up to the new capacity. A rate below `max_take` admits nothing."""
        self._refill(now)
        # Burst plus refill equals a minute's amount, so that no window of a minute admits more.
        capacity = max(self._max_take, per_minute * _BURST_FRACTION)
        self._capacity = capacity if capacity < per_minute else 0.0
        self._per_second = (per_minute - self._capacity) / _MINUTE_SECONDS if self._capacity else 0.0
        self._level = min(self._level, self._capacity)

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is available, at most a full bucket. Infinity if the rate is zero."""
        self._refill(now)
        if not self._capacity:
            return math.inf
        missing = min(amount, self._capacity) - self._level
        # Ignore rounding errors: waiting for them may not change the level.
        return missing / self._per_second if missing > 1e-9 * self._capacity else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take `amount`. The level may become negative; later requests then wait longer."""
        self._refill(now)
        self._level -= amount

    def refund(self, amount: float, now: float) -> None:
        """Return an unused part of what was taken; negative if more was used."""
        self._refill(now)
        self._level = min(self._capacity, self._level + amount)

    def _refill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + max(0.0, now - self._updated_at) * self._per_second)
        self._updated_at = max(self._updated_at, now)
