"""What the status keeps of a driver's reports changes with events, not with the time that passes."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.wire.driver_status import DriverStatus, HungPart, Outage
from rljob_core.backend import ObservedState
from rljob_core.plan.observed_job import observe_job
from rljob_core.plan.progress import end_progress, observe_progress
from tests.support.job_simulation import START, make_job

PART = {"role": "trainer", "name": "rank 3", "limit_seconds": 60.4, "doing": "accumulate", "action": "is replaced"}
OUTAGE = {"what": "spec.rewards[0].http (http://judge)", "limit_seconds": 600}


def observe(job, driver, seconds):
    """The job after a poll at this time."""
    observed = observe_job(job, ObservedState(driver=driver))
    progress = observe_progress(observed, START + timedelta(seconds=seconds))
    return job.model_copy(update={"status": job.status.model_copy(update={"progress": progress})})


def report(at, age=0.0, *, step=4, run_id="run", message="503"):
    """What a driver said `age` before `at`: its step ended at 100, and since then a rank hangs and a judge is out."""
    seconds = max(0.0, at - age - 100)
    return DriverStatus(
        run_id=run_id,
        step=step,
        since_step_seconds=seconds,
        training_share=0.5,
        hung=[HungPart(**PART, seconds=seconds)],
        outages=[Outage(**OUTAGE, seconds=seconds, message=message)],
    )


@given(st.lists(st.tuples(st.floats(0.1, 600), st.floats(0, 60), st.sampled_from(["503", "refused"])), min_size=1))
def test_passing_time_changes_nothing(polls):
    """The answers of a driver are up to a minute old, and each attempt to reach a service may fail differently."""
    at = 200.0
    first = job = observe(make_job(), report(at), at)
    for after, age, message in polls:
        at += after
        job = observe(job, report(at, age, message=message), at)
        assert job.status == first.status
    progress = job.status.progress
    moment = START + timedelta(seconds=100)
    assert progress.last_step_time == progress.hung[0].since == progress.outages[0].since == moment
    assert (progress.hung[0].limit_seconds, progress.outages[0].limit_seconds) == (60, 600)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(1, 100)), min_size=1, max_size=30))
def test_time_of_the_last_step_moves_with_counted_steps_only(steps):
    """A driver that restarts returns to the step of its checkpoint, which is no new one."""
    job, at, last, expected = make_job(), 0.0, 0, None
    for step, after in steps:
        at += after
        job = observe(job, DriverStatus(run_id="run", step=step, since_step_seconds=min(after, 1.0)), at)
        if step > last:
            expected = START + timedelta(seconds=int(at - min(after, 1.0)))
        last = step
        assert job.status.progress.last_step_time == expected


def test_new_folder_has_no_step_yet():
    job = observe(make_job(), report(200), 200)
    job = observe(job, DriverStatus(run_id="other", since_step_seconds=5), 300)
    assert job.status.progress.last_step_time is None


def test_part_that_hangs_again_has_a_new_time():
    job = observe(make_job(), report(200), 200)
    job = observe(job, DriverStatus(run_id="run", step=4, hung=[HungPart(**PART, seconds=5)]), 900)
    assert job.status.progress.hung[0].since == START + timedelta(seconds=895)


def test_without_an_answer_the_progress_stays_and_an_end_clears_what_hangs():
    job = observe(make_job(), report(200), 200)
    assert observe(job, None, 300).status.progress == job.status.progress
    ended = end_progress(job.status.progress)
    assert (ended.hung, ended.outages, ended.last_step_time) == ([], [], job.status.progress.last_step_time)
