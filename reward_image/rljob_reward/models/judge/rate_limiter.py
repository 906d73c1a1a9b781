"""The limits of an endpoint, as this replica holds its share of them: requests, tokens, concurrency, and its pauses.

Owns when an execution may begin and what it is charged. Leaves shares and buckets to their modules. Invariant: an
execution begins only when all of its requests may be sent at once, so that waiting for a limit is waiting in the queue
and never runs into a time-out; only a request that is repeated waits inside its execution.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rljob_api.manifest.scorers import EndpointLimits
from rljob_reward.models.judge.limits import TokenBucket
from rljob_reward.models.judge.shares import ALONE, Share

REQUESTS, TOKENS, CONCURRENCY, RETRY_AFTER, SHARE = "requests", "tokens", "concurrency", "retry_after", "share"
_MEAN_WEIGHT = 0.1
_LOOK_SECONDS = 0.05


class LimitGate:
    """`num_requests`: of one execution. `first_tokens`: what one is charged until some have told their real number."""

    def __init__(
        self,
        limits: EndpointLimits,
        num_requests: int,
        first_tokens: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._num_requests = num_requests
        self._tokens_each = first_tokens
        self._clock = clock
        self._in_flight = 0
        self._paused_until = 0.0
        self._share: Share | None = ALONE
        now = clock()
        per_minute, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = TokenBucket(per_minute, num_requests, now) if per_minute else None
        self._tokens = TokenBucket(tokens, 0.0, now) if tokens else None

    def set_share(self, share: Share | None) -> None:
        """None: nothing may be asked."""
        if share == self._share:
            return
        self._share = share
        now = self._clock()
        if share is None:
            return
        if self._requests and self._limits.requests_per_minute:
            self._requests.set_rate(share.part(self._limits.requests_per_minute), now)
        if self._tokens and self._limits.tokens_per_minute:
            self._tokens.set_rate(share.part(self._limits.tokens_per_minute), now)

    def closed(self) -> tuple[float, str]:
        """Seconds until an execution may begin, and the limit that has most to do with it."""
        now = self._clock()
        if self._share is None:
            return float("inf"), SHARE
        limit = self._limits.concurrency
        if limit is not None and self._in_flight + self._num_requests > self._share.portion(limit):
            return float("inf"), CONCURRENCY
        waits = [(self._paused_until - now, RETRY_AFTER)]
        if self._requests:
            waits.append((self._requests.seconds_until(self._num_requests, now), REQUESTS))
        if self._tokens:
            waits.append((self._tokens.seconds_until(self._tokens_each, now), TOKENS))
        seconds, name = max(waits)
        return (seconds, name) if seconds > 0 else (0.0, "")

    def enter(self) -> float:
        """An execution begins: it is charged for all of its requests, and for tokens as the ones before it took."""
        now = self._clock()
        self._in_flight += self._num_requests
        if self._requests:
            self._requests.take(self._num_requests, now)
        if self._tokens:
            self._tokens.take(self._tokens_each, now)
        return self._tokens_each

    def leave(self, charged: float, used: float | None) -> None:
        """An execution ended. `used`: its tokens; None when it was cut off, and what it took nobody knows."""
        self._in_flight -= self._num_requests
        if used is None:
            return
        self._tokens_each += _MEAN_WEIGHT * (used - self._tokens_each)
        if self._tokens:
            self._tokens.give_back(charged - used, self._clock())

    def pause(self, seconds: float) -> None:
        """The endpoint wants nothing for so long."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    async def enter_again(self) -> None:
        """One more request of an execution under way, when the rate allows it."""
        while self._requests:
            seconds = self._requests.seconds_until(1, self._clock())
            if not seconds:
                return self._requests.take(1, self._clock())
            await asyncio.sleep(min(seconds, _LOOK_SECONDS))
