"""The published setting from its phases: 40.6 s of generation, 83.5 s of log-probs, 126.6 s of updates."""

import pytest
from schedule_simulation import arithmetic
from schedule_simulation.arithmetic import FLOOR, on_policy, one_step_off, scoring_seconds, synchronous


def test_scoring_takes_the_work_over_the_slots_and_a_tail():
    work = 5120 * 20.5 / 256
    assert work < scoring_seconds(5120, 256) < work + 40
    assert 39 < scoring_seconds(5120, 5120) <= 40, "the slowest of all"


def test_free_slots_leave_the_floor():
    assert pytest.approx(250.7) == FLOOR
    assert synchronous(5120) == on_policy(5120) == one_step_off(5120) == pytest.approx(FLOOR)


def test_256_slots_give_the_published_steps_within_a_few_percent():
    assert synchronous(256) == pytest.approx(arithmetic.PUBLISHED["baseline"], rel=0.05)
    assert one_step_off(256) == pytest.approx(arithmetic.PUBLISHED["one_step_off"], rel=0.05)
    assert one_step_off(256) == pytest.approx(arithmetic.PUBLISHED["best"], rel=0.05)


def test_1024_slots_with_on_policy_mini_batches_reach_the_floor():
    assert on_policy(1024) == pytest.approx(FLOOR)
    assert synchronous(1024) > 1.1 * FLOOR
