"""Which statuses wait while Pods start, for how long, and which never do."""

import pytest

from rljob_api.manifest.status import JobProgress, RLJobStatus, RoleStatus
from rljob_core.backend import Event, JobKey, Plan
from rljob_core.loop.reconcile import MAX_WAIT_SECONDS, MAX_WRITES_PER_SECOND, MIN_WAIT_SECONDS, StatusPace
from rljob_core.plan.conditions import build_conditions
from tests.support.job_simulation import START

KEY = JobKey("ns", "a")


def build_status(ready=0, message="waits for 2 of 2 rollout Pods", reason="WaitingForPods", phase="Pending", **fields):
    conditions = build_conditions(RLJobStatus(), {}, {"Running": (reason, message)}, 1, START)
    roles = [RoleStatus(name="rollout", desired=2, ready=ready)]
    return RLJobStatus(conditions=conditions, roles=roles, rollouts=f"{ready}/2", phase=phase, **fields)


STORED = build_status()
COUNTED = build_status(1, "waits for 1 of 2 rollout Pods", rollout_replicas=1, progress=JobProgress(phase="starting"))


def plan(status, *events):
    return Plan((), (), status, events)


def pace_after_write(num_jobs=1):
    """A pace that has just written the status of a job, and then those of others."""
    pace = StatusPace()
    pace.record(KEY, RLJobStatus(), STORED, 0.0)
    for number in range(1, num_jobs):
        pace.record(JobKey("ns", f"other-{number}"), RLJobStatus(), STORED, 0.0)
    return pace


def test_counts_of_starting_pods_wait_for_the_interval():
    pace = pace_after_write()
    assert pace.wait_seconds(KEY, STORED, plan(COUNTED), 1.0) == MIN_WAIT_SECONDS - 1.0
    assert pace.wait_seconds(KEY, STORED, plan(COUNTED), MIN_WAIT_SECONDS) == 0.0
    assert pace.wait_seconds(JobKey("ns", "b"), STORED, plan(COUNTED), 1.0) == 0.0, "none was written before"
    assert pace.wait_seconds(KEY, STORED, plan(STORED), 1.0) == 0.0, "there is nothing to write"


@pytest.mark.parametrize(
    "wanted",
    [
        build_status(1, phase="Running"),
        build_status(1, reason="Unschedulable"),
        build_status(1, observed_generation=2),
        build_status(1).model_copy(update={"roles": [RoleStatus(name="rollout", desired=2, ready=1, restarts=1)]}),
        build_status(1).model_copy(update={"conditions": STORED.conditions[:-1]}),
    ],
    ids=["phase", "reason", "generation", "restarts", "condition"],
)
def test_whatever_else_changes_is_written_at_once(wanted):
    assert pace_after_write().wait_seconds(KEY, STORED, plan(wanted), 1.0) == 0.0


def test_status_with_an_event_is_written_at_once():
    event = Event("Warning", "ImagePull", "no such image")
    assert pace_after_write().wait_seconds(KEY, STORED, plan(COUNTED, event), 1.0) == 0.0


def test_counts_of_a_job_that_runs_are_written_at_once():
    pace, running = pace_after_write(), build_status(1, phase="Running")
    pace.record(KEY, STORED, running, 1.0)
    assert pace.wait_seconds(KEY, running, plan(build_status(2, phase="Running")), 1.5) == 0.0


@pytest.mark.parametrize(("num_jobs", "seconds"), [(1, MIN_WAIT_SECONDS), (200, 20.0), (5000, MAX_WAIT_SECONDS)])
def test_many_starting_jobs_write_a_bounded_number_of_times(num_jobs, seconds):
    assert pace_after_write(num_jobs).wait_seconds(KEY, STORED, plan(COUNTED), 0.0) == seconds
    assert num_jobs / seconds <= max(MAX_WRITES_PER_SECOND, num_jobs / MAX_WAIT_SECONDS)


def test_writes_are_forgotten_after_the_longest_wait():
    pace = pace_after_write(100)
    pace.record(JobKey("ns", "late"), RLJobStatus(), STORED, MAX_WAIT_SECONDS + 1.0)
    assert list(pace._written) == [JobKey("ns", "late")]
