"""When an execution may begin, with a clock of the test's own."""

from __future__ import annotations

import math

import pytest

from rljob_api.manifest.scorers import EndpointLimits
from rljob_reward.models.judge.rate_limiter import CONCURRENCY, REQUESTS, RETRY_AFTER, SHARE, TOKENS, LimitGate
from rljob_reward.models.judge.shares import Share


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_without_limits_it_is_open(clock):
    gate = LimitGate(EndpointLimits(), 1, 100.0, clock)
    assert gate.closed() == (0.0, "")
    assert gate.enter() == 100.0


def test_concurrency_counts_all_votes_and_the_replicas_share(clock):
    gate = LimitGate(EndpointLimits(concurrency=9), 2, 0.0, clock)
    gate.set_share(Share(0, 2))  # 5 of 9
    for _ in range(2):
        assert gate.closed()[0] == 0
        gate.enter()
    assert gate.closed() == (math.inf, CONCURRENCY)
    gate.leave(0.0, None)
    assert gate.closed()[0] == 0


def test_requests_of_all_votes_must_have_leave_at_once(clock):
    gate = LimitGate(EndpointLimits(requests_per_minute=60), 3, 0.0, clock)
    assert gate.closed()[1] == REQUESTS
    clock.now += 60
    gate.enter()
    gate.enter()
    seconds, limit = gate.closed()
    assert (limit, seconds > 0) == (REQUESTS, True)
    clock.now += seconds
    assert gate.closed()[0] == 0


def test_tokens_are_charged_as_they_are_expected_and_settled_as_they_were(clock):
    gate = LimitGate(EndpointLimits(tokens_per_minute=6000), 1, 600.0, clock)
    clock.now += 60
    charged = gate.enter()
    assert gate.closed()[1] == TOKENS, "600 of 600 are charged"
    gate.leave(charged, 100.0)
    assert gate.enter() == pytest.approx(550), "the expectation follows what was used"


def test_an_execution_that_was_cut_off_keeps_its_charge(clock):
    gate = LimitGate(EndpointLimits(tokens_per_minute=6000), 1, 600.0, clock)
    clock.now += 60
    gate.leave(gate.enter(), None)
    assert gate.closed()[1] == TOKENS


def test_the_endpoints_pause_holds_for_all(clock):
    gate = LimitGate(EndpointLimits(), 1, 0.0, clock)
    gate.pause(5)
    gate.pause(2)
    assert gate.closed() == (5, RETRY_AFTER)
    clock.now += 5
    assert gate.closed()[0] == 0


def test_without_a_share_nothing_begins(clock):
    gate = LimitGate(EndpointLimits(concurrency=9), 1, 0.0, clock)
    gate.set_share(None)
    assert gate.closed() == (math.inf, SHARE)
