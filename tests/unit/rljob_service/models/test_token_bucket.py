from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from rljob_service.models.token_bucket import TokenBucket

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
