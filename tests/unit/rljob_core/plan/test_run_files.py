"""What becomes of a run's files, with and without a claim, is said before, when, and after they are lost."""

from __future__ import annotations

import pytest

from rljob_api.wire.driver_status import DriverStatus
from rljob_core.backend import ChildKey, Event, ObservedState
from rljob_core.plan import conditions, run_files
from rljob_core.plan.observed_job import observe_job
from tests.support.job_simulation import JobSimulation, make_job

STORAGE = {"storage": "s3://bucket/runs"}
CLAIM = {"persistentVolumeClaim": {"claimName": "runs"}}
FIELD = "spec.checkpoint.persistentVolumeClaim"


def pod(role: str) -> dict:
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
    labels |= {"rljob.dev/reward": "correct"} if role == "reward" else {}
    container = {"name": role, "restartCount": 0, "state": {"running": {}}, "lastState": {}}
    metadata = {"name": f"gsm8k-{role}-0", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00+00:00"}
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "conditions": ready, "containerStatuses": [container]}
    return {"kind": "Pod", "metadata": metadata, "status": status}


def run_job(*, step: int = 7, **checkpoint: object) -> JobSimulation:
    """A job that has run for some steps."""
    simulation = JobSimulation(make_job(checkpoint=checkpoint))
    simulation.driver = DriverStatus(run_id="first", step=step)
    simulation.reconcile(**{role: pod(role) for role in ("head", "trainer", "rollout", "reward")})
    assert simulation.job.status.phase == "Running"
    return simulation


def find_lost(simulation: JobSimulation):
    return conditions.find(simulation.job.status, "ProgressLost")


def messages(simulation: JobSimulation, reason: str) -> list[str]:
    return [event.message for event in simulation.events if event.reason == reason and event.type == "Warning"]


def test_new_run_folder_is_a_condition_and_an_event_with_steps_and_field() -> None:
    simulation = run_job()
    assert find_lost(simulation) is None
    simulation.reconcile(head=None)
    for driver in (None, DriverStatus(run_id="second")):
        simulation.driver = driver
        simulation.reconcile(head=pod("head"))
    lost = find_lost(simulation)
    assert lost.message == (
        f"the run's files were lost at step 7, because they were in the head's Pod; training starts again at step 0; "
        f"set {FIELD} or spec.checkpoint.storage"
    )
    for step in (1, 2, 9):
        simulation.driver = DriverStatus(run_id="second", step=step)
        simulation.reconcile()
        assert find_lost(simulation) == lost, "it stays"
    assert messages(simulation, "NewRunFolder") == [lost.message]
    simulation.driver = DriverStatus(run_id="third")
    simulation.reconcile()
    assert "at step 9" in find_lost(simulation).message
    assert len(messages(simulation, "NewRunFolder")) == 2, "each loss is an event"


@pytest.mark.parametrize("run_id", ["first", ""])
def test_restart_in_the_same_folder_loses_nothing(run_id: str) -> None:
    """Neither does a driver of an earlier version, which reports no folder."""
    simulation = run_job(**CLAIM)
    simulation.driver = DriverStatus(run_id=run_id)
    simulation.reconcile()
    simulation.driver = DriverStatus(run_id="first", step=5)
    simulation.reconcile()
    assert find_lost(simulation) is None


def test_emptied_claim_is_reported_too() -> None:
    simulation = run_job(**CLAIM)
    simulation.driver = DriverStatus(run_id="second")
    simulation.reconcile()
    assert (
        "because the claim runs does not have the folder of this run (if spec.checkpoint named another"
        in find_lost(simulation).message
    )


def test_files_in_object_storage_are_kept_and_an_emptied_prefix_is_reported() -> None:
    simulation = run_job(**STORAGE)
    assert messages(simulation, "Running") == []
    simulation.driver = DriverStatus(run_id="second")
    simulation.reconcile()
    assert (
        "because s3://bucket/runs does not have the folder of this run (if spec.checkpoint named another"
        in find_lost(simulation).message
    )


def test_head_lost_before_the_first_step_loses_nothing() -> None:
    simulation = run_job(step=0)
    simulation.driver = DriverStatus(run_id="second")
    simulation.reconcile()
    assert find_lost(simulation) is None


@pytest.mark.parametrize(
    ("export", "what"), [("last", "and the exported model"), ("never", "checkpoints, metrics are")]
)
def test_job_without_a_claim_says_once_that_its_files_will_be_deleted(export: str, what: str) -> None:
    simulation = run_job(export=export)
    simulation.reconcile()
    (message,) = messages(simulation, "Running")
    assert message.startswith(f"all Pods are ready; {FIELD} is not set: ")
    assert what in message
    assert messages(run_job(**CLAIM), "Running") == []


def test_suspension_and_success_say_that_the_files_were_lost() -> None:
    for checkpoint, expected in (({}, True), (CLAIM, False)):
        simulation = run_job(**checkpoint)
        head = ChildKey("Job", "gsm8k-head")
        completed = simulation.children[head] | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
        simulation.job.spec.suspend = True
        simulation.reconcile()
        assert ("its 7 steps were lost" in conditions.find(simulation.job.status, "Suspended").message) == expected
        simulation.job.spec.suspend = False
        simulation.children[head] = completed
        simulation.reconcile()
        assert (FIELD in conditions.find(simulation.job.status, "Succeeded").message) == expected


def test_a_backend_that_keeps_the_folder_warns_of_nothing() -> None:
    job, begins = make_job(), Event("Normal", "Running", "all Pods are ready")
    for keeps in (False, True):
        observed = observe_job(job, ObservedState(keeps_files=keeps))
        assert (run_files.add_warning(observed, begins) == begins) is keeps
        assert ("deleted" in run_files.describe_success(observed)) is not keeps


def test_an_evaluation_loses_no_model():
    source = {"source": "/data/rows.jsonl"}
    job = make_job(task="evaluate", data={"train": source, "eval": source})
    assert not job.spec.trains
    assert f"{FIELD} is not set: metrics and trajectories are deleted" in run_files.describe_loss(job)
