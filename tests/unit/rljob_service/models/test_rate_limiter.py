from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rljob_api.manifest.services.models import EndpointLimits
from rljob_service.models.rate_limiter import CONCURRENCY, REQUESTS, RETRY_AFTER, TOKENS, RateLimiter, TokenBucket


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


RATES = st.floats(min_value=1, max_value=1e6)
STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 20)), max_size=60)


def take_greedily(bucket, steps, max_take):
    """Take as much as is available at each step. Return (time, amount) for each take."""
    now, taken = 0.0, []
    for pause, tries in steps:
        now += pause
        for _ in range(tries):
            if bucket.seconds_until(max_take, now) == 0:
                bucket.take(max_take, now)
                taken.append((now, max_take))
    return taken


@given(rate=RATES, max_take=st.integers(1, 50), steps=STEPS)
def test_no_minute_admits_more_than_the_rate(rate, max_take, steps):
    taken = take_greedily(TokenBucket(rate, max_take, 0.0), steps, max_take)
    for start, _ in taken:
        amount = sum(n for at, n in taken if start <= at < start + 60)
        assert amount <= rate * (1 + 1e-6), f"{amount} in the minute from {start}"


@given(rate=RATES, max_take=st.integers(1, 50), steps=STEPS)
def test_amount_is_available_after_the_returned_seconds(rate, max_take, steps):
    assume(rate >= 2 * max_take)
    bucket = TokenBucket(rate, max_take, 0.0)
    take_greedily(bucket, steps, max_take)
    now = sum(pause for pause, _ in steps)
    seconds = bucket.seconds_until(max_take, now)
    assert seconds <= 120, "at least half of the rate refills it"
    assert bucket.seconds_until(max_take, now + seconds * (1 + 1e-9) + 1e-6) == 0


@given(first=RATES, second=RATES, max_take=st.integers(1, 20), steps=STEPS)
def test_lowered_rate_applies_immediately(first, second, max_take, steps):
    assume(second <= first)
    bucket = TokenBucket(first, max_take, 0.0)
    bucket.set_rate(second, 100.0)
    taken = take_greedily(bucket, [(100.0, 1), *steps], max_take)
    for start, _ in taken:
        assert sum(n for at, n in taken if start <= at < start + 60) <= second * (1 + 1e-6)


def test_rate_below_one_take_per_minute_admits_nothing():
    assert TokenBucket(3, 4, 0.0).seconds_until(4, 1000.0) == math.inf


def test_bucket_starts_empty_and_then_holds_a_burst():
    bucket = TokenBucket(600, 1, 0.0)
    assert bucket.seconds_until(1, 0.0) > 0
    assert bucket.seconds_until(60, 1e6) == 0, "a burst of a tenth of the minute, later"


def test_debt_delays_and_refund_restores():
    bucket = TokenBucket(600, 0, 0.0)
    bucket.take(60, 1000.0)
    bucket.refund(-30, 1000.0)
    assert bucket.seconds_until(15, 1000.0) == 45 / 9
    bucket.refund(45, 1000.0)
    assert bucket.seconds_until(15, 1000.0) == 0


def test_amount_above_capacity_waits_for_a_full_bucket():
    bucket = TokenBucket(600, 0, 0.0)
    assert bucket.seconds_until(10_000, 1000.0) == 0
