"""The time since the last step, and what the job's own steps allow."""

import pytest

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.driver.step_clock import StepClock
from rljob_trainer.liveness.judge import Pace


@pytest.fixture
def steps():
    return StepClock(Pace(HangDetection(min_seconds=10, max_seconds=1000)), 0.0)


def pass_seconds(steps, start, seconds, **flags):
    for second in range(start + 1, start + seconds + 1):
        steps.tick(float(second), **flags)
    return start + seconds


def test_nothing_is_known_before_the_driver_trains(steps):
    pass_seconds(steps, 0, 2000)
    assert (steps.seconds, steps.is_stuck) == (None, False)


def test_a_new_trainer_group_does_not_begin_the_step_again(steps):
    steps.begin()
    now = pass_seconds(steps, 0, 20)
    steps.begin()
    assert (steps.seconds, steps.limit_seconds) == (20, 1000)
    steps.finish()
    assert (steps.seconds, steps.limit_seconds) == (0, 25 * 20)
    now = pass_seconds(steps, now, 500, is_idle=True)
    assert not steps.is_stuck
    now = pass_seconds(steps, now, 50)
    assert not steps.is_stuck, "it is late, and somebody works"
    now = pass_seconds(steps, now, 11, is_idle=True)
    assert not steps.is_stuck, "all are idle between two pieces of work"
    pass_seconds(steps, now, 1, is_idle=True)
    assert steps.is_stuck


def test_steps_of_a_warm_start_do_not_say_how_long_others_take(steps):
    steps.begin(is_warm=True)
    now = pass_seconds(steps, 0, 1)
    steps.finish(is_warm=True)
    assert steps.limit_seconds == 25
    pass_seconds(steps, now, 1)
    steps.finish()
    assert (steps.seconds, steps.limit_seconds) == (0, 1000)


def test_an_outage_is_no_time_of_a_step(steps):
    steps.begin()
    steps.finish()
    now = pass_seconds(steps, 0, 5)
    pass_seconds(steps, now, 5000, is_paused=True, is_idle=True)
    assert (steps.seconds, steps.is_stuck) == (5, False)
