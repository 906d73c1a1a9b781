"""A running job says whether its steps finish, and else who hangs or is waited for."""

from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rljob_api.wire.driver_status import SERVING, DriverStatus, HungPart, Outage
from rljob_core.backend import DRIVER_SILENT, DRIVER_UNREADABLE, ObservedState
from rljob_core.plan import conditions
from rljob_core.plan.job import plan_job
from tests.support.job_simulation import JobSimulation, make_job, make_service_job
from tests.unit.rljob_core.plan.test_run_files import pod

RANK = HungPart(role="trainer", name="rank 3", seconds=80, limit_seconds=60, doing="update", action="it is replaced")
JUDGE = Outage(what="spec.rewards[0].http (http://judge)", seconds=100, limit_seconds=600, message="HTTP 503")


def run_job(**spec):
    simulation = JobSimulation(make_job(**spec))
    poll(simulation, head=pod("head"), trainer=pod("trainer"), rollout=pod("rollout"), reward=pod("reward"))
    assert simulation.job.status.phase == "Running"
    return simulation


def poll(simulation, seconds=1, **report):
    pods = {name: value for name, value in report.items() if name in ("head", "trainer", "rollout", "reward")}
    simulation.driver = DriverStatus(run_id="run", **{k: v for k, v in report.items() if k not in pods})
    return simulation.reconcile(seconds, **pods)


def progressing(simulation):
    found = conditions.find(simulation.job.status, "Progressing")
    return (found.status, found.reason) if found else None


def messages(simulation):
    reasons = ("PartHung", "WaitsForOutage", "ProgressDeadlineExceeded", "StepFinished", "Training", "HeadNotReady")
    return [(event.type, event.reason) for event in simulation.events if event.reason in reasons]


def test_job_without_a_step_within_its_deadline_says_so_and_says_when_it_continues():
    simulation = run_job(progressDeadlineSeconds=300)
    assert progressing(simulation) == ("True", "Training")
    poll(simulation, 60, step=1, since_step_seconds=10)
    assert progressing(simulation) == ("True", "StepFinished")
    plan = poll(simulation, 60, step=1, since_step_seconds=70, phase="update")
    assert plan.valid_until == simulation.now + timedelta(seconds=230)
    assert plan.requeue_after_seconds <= 230
    poll(simulation, 230, step=1, since_step_seconds=300, phase="update", waits_for="rank 3")
    assert progressing(simulation) == ("False", "ProgressDeadlineExceeded")
    message = conditions.find(simulation.job.status, "Progressing").message
    for part in ("since 2026-01-01T00:00:51Z", "spec.progressDeadlineSeconds is 300", "phase is update", "raise"):
        assert part in message
    poll(simulation, 10, step=1, since_step_seconds=310, phase="update", waits_for="rank 4")
    poll(simulation, 10, step=2, since_step_seconds=1)
    assert messages(simulation) == [("Warning", "ProgressDeadlineExceeded"), ("Normal", "StepFinished")]
    assert simulation.job.status.phase == "Running", "the condition alone acts on nothing"


def test_service_makes_no_steps_and_says_whom_it_serves():
    simulation = JobSimulation(make_service_job(progressDeadlineSeconds=300))
    poll(simulation, head=pod("head"), trainer=pod("trainer"), rollout=pod("rollout"))
    for _ in range(3):
        poll(simulation, 200, phase=SERVING, waits_for="no clients")
    assert progressing(simulation) == ("True", "Serving")
    assert conditions.find(simulation.job.status, "Progressing").message == "no clients"
    poll(simulation, 1, phase=SERVING, waits_for="no clients", hung=[RANK])
    assert progressing(simulation) == ("False", "PartHung")


def test_without_a_deadline_the_jobs_own_steps_decide():
    simulation = run_job()
    poll(simulation, step=1, since_step_seconds=10**6)
    assert progressing(simulation) == ("True", "StepFinished"), "the driver knows no limit yet"
    poll(simulation, step=1, since_step_seconds=61, step_limit_seconds=60)
    assert progressing(simulation) == ("False", "ProgressDeadlineExceeded")
    assert "the job's own steps allow 60 s" in conditions.find(simulation.job.status, "Progressing").message


def test_who_hangs_is_named_before_the_deadline_and_after_it():
    simulation = run_job(progressDeadlineSeconds=300)
    poll(simulation, step=1, since_step_seconds=80, hung=[RANK])
    assert progressing(simulation) == ("False", "PartHung")
    message = conditions.find(simulation.job.status, "Progressing").message
    assert message == "trainer: rank 3 hangs since 2025-12-31T23:58:42Z (limit 60 s); update; it is replaced"
    other = RANK.model_copy(update={"name": "rank 4"})
    poll(simulation, step=1, since_step_seconds=90, hung=[RANK, other])
    poll(simulation, step=1, since_step_seconds=300, hung=[RANK, other])
    assert progressing(simulation) == ("False", "ProgressDeadlineExceeded")
    assert "rank 4 hangs" in conditions.find(simulation.job.status, "Progressing").message
    reasons = [reason for _, reason in messages(simulation)]
    assert reasons == ["PartHung", "PartHung", "ProgressDeadlineExceeded"], "a second part is another event"


def test_outage_stops_the_clock_and_says_when_the_job_fails():
    simulation = run_job(progressDeadlineSeconds=300)
    plan = poll(simulation, step=1, since_step_seconds=299, outages=[JUDGE])
    assert progressing(simulation) == ("False", "WaitsForOutage")
    assert plan.valid_until > simulation.now + timedelta(days=1)
    message = conditions.find(simulation.job.status, "Progressing").message
    for part in (JUDGE.what, "HTTP 503", "the job fails at 2026-01-01T00:08:22Z (spec.outageSeconds)"):
        assert part in message


def test_driver_that_is_not_heard_is_unknown_and_one_missed_answer_is_not():
    simulation = run_job(progressDeadlineSeconds=300)
    poll(simulation, step=1, since_step_seconds=1)
    simulation.driver = None
    simulation.reconcile()
    assert progressing(simulation) == ("True", "StepFinished")
    simulation.reconcile(head=None)
    assert progressing(simulation) == ("Unknown", "HeadNotReady")
    simulation.reconcile(head=pod("head"))
    assert progressing(simulation) == ("Unknown", "DriverStarting")
    poll(simulation, step=1)
    assert progressing(simulation) == ("True", "StepFinished")
    assert messages(simulation) == [], "the restart has its own events"


def test_silent_driver_of_a_ready_head_is_unknown_until_it_answers():
    simulation = run_job(progressDeadlineSeconds=300)
    poll(simulation, step=1, since_step_seconds=1, waits_for="waits for 100 of 512 completions")
    simulation.driver, simulation.driver_problem = None, f"{DRIVER_SILENT}: connection refused"
    for _ in range(3):
        plan = simulation.reconcile(10)
        assert progressing(simulation) == ("Unknown", "DriverSilent")
        assert simulation.job.status.progress.waits_for == simulation.driver_problem
    assert plan.valid_until > simulation.now + timedelta(days=1), "the driver's answer alone changes it"
    simulation.reconcile(10, head=None)
    assert progressing(simulation) == ("Unknown", "HeadNotReady")
    assert simulation.job.status.progress.waits_for == ""
    simulation.reconcile(10, head=pod("head"))
    assert progressing(simulation) == ("Unknown", "DriverSilent")
    simulation.driver_problem = ""
    poll(simulation, step=2, since_step_seconds=1)
    assert progressing(simulation) == ("True", "StepFinished")
    events = [(event.type, event.message) for event in simulation.events if event.reason == "DriverSilent"]
    assert events == [("Warning", f"{DRIVER_SILENT}: connection refused")] * 2


def test_head_that_ends_after_its_last_step_is_not_silent():
    simulation = run_job()
    poll(simulation, step=1, since_step_seconds=1, phase="done")
    simulation.driver, simulation.driver_problem = None, f"{DRIVER_SILENT}: connection refused"
    simulation.reconcile(head=pod("head") | {"status": {"phase": "Running"}})
    assert progressing(simulation) == ("True", "StepFinished")


def test_unreadable_answer_is_unknown():
    simulation = run_job()
    problem = f"{DRIVER_UNREADABLE}: it is no JSON"
    observed = ObservedState(simulation.children, tuple(simulation.pods.values()), driver_problem=problem)
    status = plan_job(simulation.job, observed, simulation.now).status
    found = conditions.find(status, "Progressing")
    assert (found.status, found.reason, found.message) == ("Unknown", "DriverUnreadable", problem)


@pytest.mark.parametrize("spec", [{"suspend": True}, {"activeDeadlineSeconds": 1}])
def test_job_that_does_not_run_has_no_condition(spec):
    simulation = run_job()
    poll(simulation, step=1, hung=[RANK], outages=[JUDGE])
    running = simulation.job.model_dump(mode="json", by_alias=True)
    simulation.job = type(simulation.job).model_validate(running | {"spec": running["spec"] | spec})
    poll(simulation, 10, step=1, hung=[RANK], outages=[JUDGE])
    assert simulation.job.status.phase in ("Suspended", "Failed")
    assert progressing(simulation) is None
    assert (simulation.job.status.progress.hung, simulation.job.status.progress.outages) == ([], [])


def test_start_of_a_driver_counts_towards_the_own_deadline_only():
    """It reports no time until it trains."""
    for spec, expected in (({"progressDeadlineSeconds": 60}, "False"), ({}, "True")):
        simulation = run_job(**spec)
        poll(simulation, 59, step_limit_seconds=None)
        assert progressing(simulation)[0] == "True"
        poll(simulation, 2)
        assert progressing(simulation)[0] == expected


REPORTS = st.fixed_dictionaries(
    {},
    optional={
        "since_step_seconds": st.floats(0, 1000),
        "step_limit_seconds": st.floats(0, 1000),
        "step": st.integers(0, 3),
        "phase": st.sampled_from(["update", "done"]),
        "hung": st.lists(st.just(RANK), max_size=1),
        "outages": st.lists(st.just(JUDGE), max_size=1),
    },
)


@example({"outages": [JUDGE]}, 2, 0.5)
@given(REPORTS, st.none() | st.integers(1, 1000), st.floats(0, 1))
def test_time_alone_changes_nothing_before_the_plan_says_so(report, deadline, share):
    """Until `valid_until` the report of a driver that goes on gives the same condition; at that moment a deadline has
    passed, whatever else is wrong."""
    simulation = run_job(progressDeadlineSeconds=deadline)
    plan = poll(simulation, **report)
    before, start = progressing(simulation), simulation.now
    assert plan.valid_until > start, "else it would be planned again at once"
    is_bounded = plan.valid_until < start + timedelta(days=1)
    left = int((plan.valid_until - start).total_seconds()) if is_bounded else 10_000
    is_paused = bool(report.get("outages"))

    def later(seconds):
        passed = (
            {}
            if is_paused or "since_step_seconds" not in report
            else {"since_step_seconds": report["since_step_seconds"] + seconds}
        )
        simulation.now = start
        poll(simulation, seconds, **report | passed)
        return progressing(simulation)

    if int(left * share) < left:
        assert later(int(left * share)) == before
    if is_bounded:
        assert later(left + 1) == ("False", "ProgressDeadlineExceeded")
