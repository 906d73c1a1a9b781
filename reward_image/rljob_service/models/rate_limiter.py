"""This replica's share of an endpoint's rate limits: requests, tokens, concurrency, and pauses after 429.

Decides when an execution may start and what it is charged. Invariant: an execution starts only if all its requests may
be sent at once, so that waiting for a limit is queueing and does not count towards timeouts. Only a retry waits inside
an execution.

A rate is kept by a token bucket, to which the caller passes the time. Invariants at a constant rate: no window of 60
seconds admits more than the rate, and every request is admitted eventually. The bucket starts empty, because a
predecessor may have used the last minute's amount.
"""

import asyncio
import math
import time
from collections.abc import Callable

from rljob_api.manifest.services.models import EndpointLimits

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


REQUESTS, TOKENS, CONCURRENCY, RETRY_AFTER = "requests", "tokens", "concurrency", "retry_after"
_MEAN_WEIGHT = 0.1
_RETRY_POLL_SECONDS = 0.05


class RateLimiter:
    """Without arguments it limits nothing. Tokens are charged in advance: `expected_tokens`, until some are known."""

    def __init__(
        self,
        limits: EndpointLimits | None = None,
        num_requests: int = 1,
        expected_tokens: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits = limits or EndpointLimits()
        self._num_requests = num_requests
        self._expected_tokens = expected_tokens
        self._clock = clock
        self._in_flight = 0
        self._paused_until = 0.0
        self._num_replicas = 1
        now = clock()
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = TokenBucket(requests, num_requests, now) if requests else None
        self._tokens = TokenBucket(tokens, 0.0, now) if tokens else None

    def set_replicas(self, number: int) -> None:
        """Use 1/number of each limit from now on."""
        self._num_replicas = number
        now = self._clock()
        if self._requests and self._limits.requests_per_minute:
            self._requests.set_rate(self._limits.requests_per_minute / number, now)
        if self._tokens and self._limits.tokens_per_minute:
            self._tokens.set_rate(self._limits.tokens_per_minute / number, now)

    def required_wait(self) -> tuple[float, str]:
        """Return the seconds until an execution may start, and the limit with the longest wait."""
        now = self._clock()
        if self._limits.concurrency is not None:
            # At least one execution, even if a rolling update adds replicas beyond the configured number.
            share = max(self._num_requests, self._limits.concurrency // self._num_replicas)
            if self._in_flight + self._num_requests > share:
                return math.inf, CONCURRENCY
        waits = [(self._paused_until - now, RETRY_AFTER)]
        if self._requests:
            waits.append((self._requests.seconds_until(self._num_requests, now), REQUESTS))
        if self._tokens:
            waits.append((self._tokens.seconds_until(self._expected_tokens, now), TOKENS))
        seconds, name = max(waits)
        return (seconds, name) if seconds > 0 else (0.0, "")

    def admit(self) -> float:
        """Charge an execution for its requests, and for the mean tokens of earlier ones."""
        now = self._clock()
        self._in_flight += self._num_requests
        if self._requests:
            self._requests.take(self._num_requests, now)
        if self._tokens:
            self._tokens.take(self._expected_tokens, now)
        return self._expected_tokens

    def release(self, charged: float, used: float | None) -> None:
        """End an execution. A cancelled one (`used` is None) keeps its charge."""
        self._in_flight -= self._num_requests
        if used is None:
            return
        self._expected_tokens += _MEAN_WEIGHT * (used - self._expected_tokens)
        if self._tokens:
            self._tokens.refund(charged - used, self._clock())

    @property
    def pause_seconds(self) -> float:
        """The rest of the pause that the endpoint asked for; 0 without one."""
        return max(0.0, self._paused_until - self._clock())

    def pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    async def acquire_retry(self) -> None:
        """Wait until the request rate admits one more request of a running execution."""
        while self._requests:
            seconds = self._requests.seconds_until(1, self._clock())
            if not seconds:
                return self._requests.take(1, self._clock())
            await asyncio.sleep(min(seconds, _RETRY_POLL_SECONDS))
