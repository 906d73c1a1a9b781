"""A token bucket that holds a rate per minute. Pure: the caller brings the time.

Invariants, while the rate stays as it is: what is taken with leave in any 60 seconds is at most the rate; leave always
comes again. It begins empty, since nobody knows what a predecessor took in the last minute.
"""

from __future__ import annotations

import math

_BURST_SHARE = 0.1
"""Of a minute's amount, what may be taken at once."""
_MINUTE_SECONDS = 60.0


class TokenBucket:
    """`largest` is the most that is ever taken at once: so much the bucket must hold."""

    def __init__(self, per_minute: float, largest: float, now: float) -> None:
        self._largest = largest
        self._level = 0.0
        self._at = now
        self._capacity = self._per_second = 0.0
        self.set_rate(per_minute, now)

    def set_rate(self, per_minute: float, now: float) -> None:
        """Change the rate; what is there stays there, as far as it fits. Less than `largest` a minute is none."""
        self._refill(now)
        # Burst and refill together are a minute's amount: no window of a minute sees more.
        capacity = max(self._largest, per_minute * _BURST_SHARE)
        self._capacity = capacity if capacity < per_minute else 0.0
        self._per_second = (per_minute - self._capacity) / _MINUTE_SECONDS if self._capacity else 0.0
        self._level = min(self._level, self._capacity)

    def seconds_until(self, amount: float, now: float) -> float:
        """Until `amount` may be taken: 0 now, infinity with no rate. More than fits waits for a full bucket."""
        self._refill(now)
        if not self._capacity:
            return math.inf
        missing = min(amount, self._capacity) - self._level
        # A rest that is smaller than a float's precision would be waited for in vain.
        return missing / self._per_second if missing > 1e-9 * self._capacity else 0.0

    def take(self, amount: float, now: float) -> None:
        """Below zero too: a debt that the next ones wait for."""
        self._refill(now)
        self._level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """Of what was taken for something that cost less; negative where it cost more."""
        self._refill(now)
        self._level = min(self._capacity, self._level + amount)

    def _refill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + max(0.0, now - self._at) * self._per_second)
        self._at = max(self._at, now)
