"""This replica's share of an endpoint's rate limits: requests, tokens, concurrency, and pauses after 429.

Decides when an execution may start and what it is charged. Invariant: an execution starts only if all its requests may
be sent at once, so that waiting for a limit is queueing and does not count towards timeouts. Only a retry waits inside
an execution.
"""

import asyncio
import math
import time
from collections.abc import Callable

from rljob_api.manifest.services.models import EndpointLimits
from rljob_service.models.token_bucket import TokenBucket

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
