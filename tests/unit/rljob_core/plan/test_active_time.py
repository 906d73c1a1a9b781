"""The deadline counts the time in which the job runs, over any sequence of states, polls, restarts and clock steps."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.status import RLJobStatus
from rljob_core.plan import conditions
from rljob_core.plan.active_time import active_seconds, deadline_of, is_past_deadline
from rljob_core.plan.job_status import set_conditions
from tests.support.job_simulation import START, make_job

JOB = make_job(activeDeadlineSeconds=3600)
STATES = {
    "pending": (),
    "queued": (conditions.QUEUED,),
    "running": (conditions.RUNNING,),
    "restarting": (conditions.RESTARTING,),
    "preempted": (conditions.RESTARTING, conditions.QUEUED),
    "invalid": (conditions.RUNNING, conditions.FAILED),
}
"""The conditions that hold."""
COUNTED = ("running", "restarting", "invalid")


class Clock:
    """Reconciles a status, as the operator does: each plan starts from the stored status of the last."""

    def __init__(self):
        self.now, self.status, self.num_writes = START, RLJobStatus(), 0

    def reconcile(self, state):
        job = JOB.model_copy(update={"status": RLJobStatus.model_validate(self.status.to_manifest())})
        reasons = dict.fromkeys(STATES[state], ("Because", ""))
        status = set_conditions(job, job.status, reasons, {}, self.now)
        self.num_writes += status != job.status
        self.status = status

    def pass_time(self, seconds):
        self.now += timedelta(seconds=seconds)


def counted(clock):
    return active_seconds(clock.status, clock.now)


PERIODS = st.lists(
    st.tuples(st.sampled_from(list(STATES)), st.lists(st.integers(0, 5000), min_size=1, max_size=3)),
    min_size=1,
    max_size=12,
)


@given(PERIODS)
def test_counted_time_is_the_time_in_running_and_restarting(periods):
    clock, expected = Clock(), 0
    for state, polls in periods:
        clock.reconcile(state)
        writes = clock.num_writes
        for seconds in polls:
            clock.pass_time(seconds)
            expected += seconds if state in COUNTED else 0
            clock.reconcile(state)
            assert counted(clock) == expected
        assert clock.num_writes == writes, "nothing is written while time passes"
        job = JOB.model_copy(update={"status": clock.status})
        assert is_past_deadline(job, clock.now) == (expected >= 3600)
        if deadline := deadline_of(JOB, clock.status):
            assert deadline - clock.now == timedelta(seconds=3600 - expected)
        assert (deadline is not None) == (state in COUNTED)


@given(PERIODS, st.data())
def test_clock_that_is_set_changes_the_count_by_at_most_its_steps(periods, data):
    clock, expected, steps = Clock(), 0, 0
    for state, polls in periods:
        clock.reconcile(state)
        for seconds in polls:
            clock.pass_time(seconds)
            expected += seconds if state in COUNTED else 0
            step = data.draw(st.integers(-5000, 5000) | st.just(0))
            clock.pass_time(step)
            steps += abs(step)
            ended = clock.status.active_seconds
            clock.reconcile(state)
            assert abs(counted(clock) - expected) <= steps
            assert counted(clock) >= ended


@pytest.mark.parametrize("state", ["running", "restarting"])
def test_status_of_an_operator_that_did_not_count_is_continued_from_its_condition(state):
    clock = Clock()
    clock.reconcile(state)
    clock.status = clock.status.model_copy(update={"active_since": None})
    clock.pass_time(500)
    clock.reconcile(state)
    assert counted(clock) == 500


@pytest.mark.parametrize(("limit", "seconds", "past"), [(None, 10**9, False), (60, 59, False), (60, 60, True)])
def test_deadline(limit, seconds, past):
    job = make_job(activeDeadlineSeconds=limit)
    job.status.active_since = START
    assert is_past_deadline(job, START + timedelta(seconds=seconds)) == past


def test_job_that_does_not_run_has_no_deadline_unless_it_has_passed():
    job = make_job(activeDeadlineSeconds=60)
    job.status.active_seconds = 59
    assert deadline_of(job, job.status) is None
    assert not is_past_deadline(job, START + timedelta(days=1))
    job.status.active_seconds = 60
    assert is_past_deadline(job, START), "a lowered limit applies at once"
