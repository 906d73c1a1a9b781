"""The bucket: no minute sees more than its amount, and leave always comes."""

from __future__ import annotations

import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rljob_reward.models.judge.limits import TokenBucket

RATES = st.floats(min_value=1, max_value=1e6)
STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 20)), max_size=60)


def take_greedily(bucket, steps, largest):
    """Takes as much as there is leave for, at each step's time. Returns (time, amount) of all that was taken."""
    now, taken = 0.0, []
    for pause, tries in steps:
        now += pause
        for _ in range(tries):
            if bucket.seconds_until(largest, now) == 0:
                bucket.take(largest, now)
                taken.append((now, largest))
    return taken


@settings(max_examples=50, deadline=None)
@given(rate=RATES, largest=st.integers(1, 50), steps=STEPS)
def test_no_minute_sees_more_than_its_amount(rate, largest, steps):
    taken = take_greedily(TokenBucket(rate, largest, 0.0), steps, largest)
    for start, _ in taken:
        amount = sum(n for at, n in taken if start <= at < start + 60)
        assert amount <= rate * (1 + 1e-6), f"{amount} in the minute from {start}"


@settings(max_examples=50, deadline=None)
@given(rate=RATES, largest=st.integers(1, 50), steps=STEPS)
def test_leave_comes_when_it_was_promised(rate, largest, steps):
    assume(rate >= 2 * largest)
    bucket = TokenBucket(rate, largest, 0.0)
    take_greedily(bucket, steps, largest)
    now = sum(pause for pause, _ in steps)
    seconds = bucket.seconds_until(largest, now)
    assert seconds <= 120, "half of the rate at least refills it"
    assert bucket.seconds_until(largest, now + seconds * (1 + 1e-9) + 1e-6) == 0


@settings(max_examples=50, deadline=None)
@given(first=RATES, second=RATES, largest=st.integers(1, 20), steps=STEPS)
def test_a_lowered_rate_holds_from_then_on(first, second, largest, steps):
    assume(second <= first)
    bucket = TokenBucket(first, largest, 0.0)
    bucket.set_rate(second, 100.0)
    taken = take_greedily(bucket, [(100.0, 1), *steps], largest)
    for start, _ in taken:
        assert sum(n for at, n in taken if start <= at < start + 60) <= second * (1 + 1e-6)


def test_a_rate_below_one_execution_a_minute_gives_none():
    assert TokenBucket(3, 4, 0.0).seconds_until(4, 1000.0) == math.inf


def test_it_begins_empty_since_nobody_knows_what_a_predecessor_took():
    bucket = TokenBucket(600, 1, 0.0)
    assert bucket.seconds_until(1, 0.0) > 0
    assert bucket.seconds_until(60, 1e6) == 0, "a burst of a tenth of the minute, later"


def test_a_debt_is_waited_for_and_what_was_not_used_comes_back():
    bucket = TokenBucket(600, 0, 0.0)
    bucket.take(60, 1000.0)
    bucket.give_back(-30, 1000.0)
    assert bucket.seconds_until(15, 1000.0) == 45 / 9
    bucket.give_back(45, 1000.0)
    assert bucket.seconds_until(15, 1000.0) == 0


def test_more_than_fits_waits_for_a_full_bucket_and_not_for_ever():
    bucket = TokenBucket(600, 0, 0.0)
    assert bucket.seconds_until(10_000, 1000.0) == 0
