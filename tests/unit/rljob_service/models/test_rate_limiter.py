from __future__ import annotations

import asyncio
import math

import pytest

from rljob_api.manifest.services.models import EndpointLimits
from rljob_service.models.rate_limiter import CONCURRENCY, REQUESTS, RETRY_AFTER, TOKENS, RateLimiter


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_execution_is_admitted_without_limits(clock):
    limiter = RateLimiter(EndpointLimits(), 1, 100.0, clock)
    assert limiter.required_wait() == (0.0, "")
    assert limiter.admit() == 100.0


def test_concurrency_counts_all_votes_and_is_divided_by_replicas(clock):
    limiter = RateLimiter(EndpointLimits(concurrency=9), 2, 0.0, clock)
    limiter.set_replicas(2)  # 4 of 9
    for _ in range(2):
        assert limiter.required_wait()[0] == 0
        limiter.admit()
    assert limiter.required_wait() == (math.inf, CONCURRENCY)
    limiter.release(0.0, None)
    assert limiter.required_wait()[0] == 0


def test_requests_of_all_votes_are_admitted_together(clock):
    limiter = RateLimiter(EndpointLimits(requests_per_minute=60), 3, 0.0, clock)
    assert limiter.required_wait()[1] == REQUESTS
    clock.now += 60
    limiter.admit()
    limiter.admit()
    seconds, limit = limiter.required_wait()
    assert (limit, seconds > 0) == (REQUESTS, True)
    clock.now += seconds
    assert limiter.required_wait()[0] == 0


def test_tokens_are_charged_by_expectation_and_corrected_by_use(clock):
    limiter = RateLimiter(EndpointLimits(tokens_per_minute=6000), 1, 600.0, clock)
    clock.now += 60
    charged = limiter.admit()
    assert limiter.required_wait()[1] == TOKENS, "600 of 600 are charged"
    limiter.release(charged, 100.0)
    assert limiter.admit() == pytest.approx(550), "the expectation follows what was used"


def test_cancelled_execution_keeps_its_charge(clock):
    limiter = RateLimiter(EndpointLimits(tokens_per_minute=6000), 1, 600.0, clock)
    clock.now += 60
    limiter.release(limiter.admit(), None)
    assert limiter.required_wait()[1] == TOKENS


def test_longest_pause_applies_to_all(clock):
    limiter = RateLimiter(EndpointLimits(), 1, 0.0, clock)
    limiter.pause(5)
    limiter.pause(2)
    assert limiter.required_wait() == (5, RETRY_AFTER)
    clock.now += 5
    assert limiter.required_wait()[0] == 0


def test_rates_are_divided_by_replicas(clock):
    limiter = RateLimiter(EndpointLimits(requests_per_minute=60, tokens_per_minute=6000), 1, 100.0, clock)
    clock.now += 60
    limiter.set_replicas(4)
    assert limiter.required_wait()[0] == 0
    limiter.admit()  # 100 of 150 tokens, a tenth of 1500
    seconds, limit = limiter.required_wait()
    assert limit == TOKENS
    assert seconds == pytest.approx(50 / 22.5)


def test_one_execution_is_admitted_when_replicas_exceed_the_limit(clock):
    limiter = RateLimiter(EndpointLimits(concurrency=4), 2, 0.0, clock)
    limiter.set_replicas(9)
    assert limiter.required_wait()[0] == 0
    limiter.admit()
    assert limiter.required_wait() == (math.inf, CONCURRENCY)


async def test_retry_waits_for_the_request_rate(clock, monkeypatch):
    limiter = RateLimiter(EndpointLimits(requests_per_minute=6000), 1, 0.0, clock)
    limiter.admit()
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await limiter.acquire_retry()
    assert sum(slept) == pytest.approx(2 / 90), "one request was admitted before its time"
