"""Which progress of a driver the plan sees, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.wire.driver_status import DriverProblem, DriverStatus, Learning, RewardDemand, ScheduleStatus
from rljob_core.backend import PROGRESS_POLL_SECONDS, DriverAnswer, JobKey
from rljob_operator.kube.progress import MAX_REPORT_SECONDS, MAX_REPORTS_PER_SECOND, ProgressReports

KEY = JobKey("ns", "a")


class Reports:
    """Reports at the times of a clock that tests move."""

    def __init__(self, num_jobs=1):
        self.now = 0.0
        self.reports = ProgressReports(lambda: self.now)
        for number in range(1, num_jobs):
            self.reports.report(JobKey("ns", f"other-{number}"), "pod", DriverAnswer(DriverStatus()))

    def __call__(self, status, pod="pod", after=0.0, key=KEY, problem=""):
        self.now += after
        return self.reports.report(key, pod, DriverAnswer(status, problem)).status


def test_few_jobs_report_each_poll():
    report = Reports()
    for step in range(5):
        assert report(DriverStatus(step=step), after=PROGRESS_POLL_SECONDS).step == step


@pytest.mark.parametrize("num_jobs", [10, 300, 1000, 5000])
def test_training_jobs_report_a_bounded_number_of_times(num_jobs):
    """Each of them changes its step and its wait at every poll of ten minutes."""
    reports, seen, num_reports = Reports(num_jobs), {}, 0
    polls, keys = 60, [JobKey("ns", f"other-{number}") for number in range(1, min(num_jobs, 11))]
    for poll in range(polls):
        reports.now += PROGRESS_POLL_SECONDS
        for key in keys:
            found = reports(DriverStatus(step=poll, waits_for=f"{poll} of 64 samples"), key=key)
            num_reports += found != seen.get(key)
            seen[key] = found
    minutes = polls * PROGRESS_POLL_SECONDS / 60
    per_second = num_reports / len(keys) * num_jobs / minutes / 60
    assert num_reports / len(keys) >= minutes, "at least one per minute"
    assert per_second <= max(1.2 * MAX_REPORTS_PER_SECOND, num_jobs / MAX_REPORT_SECONDS * 1.2)


def test_change_that_is_not_progress_is_seen_at_once():
    report = Reports(num_jobs=1000)
    first = report(DriverStatus(step=1))
    learning = Learning(is_learning=False, reason="NoAdvantages", message="all equal")
    problem = DriverProblem(reward="correct", reason="exception")
    for name, value in {
        "total_steps": 9,
        "restarts": {"trainer": 1},
        "learning": learning,
        "problems": [problem],
        "demand": {"correct": RewardDemand(elapsed_seconds=1)},
    }.items():
        seen = report(DriverStatus(step=2, waits_for="samples", **{name: value}))
        assert seen == first.model_copy(update={name: value}), "and the progress is still the reported one"


def test_more_samples_with_the_same_problem_do_not_count_as_a_change():
    report = Reports(num_jobs=1000)
    problem = DriverProblem(reward="correct", reason="exception", message="boom")
    first = report(DriverStatus(step=1, problems=[problem]))
    assert report(DriverStatus(step=2, problems=[problem.model_copy(update={"count": 7})])) == first


def test_groups_that_move_are_progress():
    report = Reports(num_jobs=1000)
    first = report(DriverStatus(schedule=ScheduleStatus(groups_in_flight=9)))
    assert report(DriverStatus(schedule=ScheduleStatus(groups_in_flight=8))) == first


def test_end_of_the_training_is_seen_at_once():
    report = Reports(num_jobs=1000)
    report(DriverStatus(step=1))
    assert report(DriverStatus(step=9, phase="done")).step == 9


def test_driver_of_another_pod_is_reported_at_once():
    report = Reports(num_jobs=1000)
    report(DriverStatus(step=5))
    assert report(DriverStatus(step=3), pod="replacement").step == 3


def test_last_progress_of_a_driver_that_has_ended_is_reported_once():
    report = Reports(num_jobs=1000)
    report(DriverStatus(step=1))
    assert report(DriverStatus(step=7), after=PROGRESS_POLL_SECONDS).step == 1
    assert report(None).step == 7
    assert report(None, after=PROGRESS_POLL_SECONDS / 2).step == 7, "until the status has it"
    assert report(None, after=PROGRESS_POLL_SECONDS) is None
    assert report(None) is None


def test_unreadable_answer_is_reported_as_it_is():
    report = Reports(num_jobs=1000)
    report(DriverStatus(step=1))
    report(DriverStatus(step=2))
    assert report(None, problem="too large") is None


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.5, 90)), min_size=1))
def test_reported_progress_is_at_most_one_interval_old(polls):
    report, answers = Reports(num_jobs=400), []
    for step, after in polls:
        seen = report(DriverStatus(step=step), after=after)
        answers.append((report.now, step))
        ends = [at for at, _ in answers[1:]] + [report.now]
        oldest = report.now - report.reports.interval_seconds
        current = {step for (_, step), end in zip(answers, ends, strict=True) if end >= oldest}
        assert seen.step in current
