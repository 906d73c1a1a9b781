"""The condition NameConflict, which is set after a plan was applied, and the phases that other tools read."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from rljob_core.backend import ObservedState
from rljob_core.loop.failures import set_reconcile_failed
from rljob_core.plan import conditions
from rljob_core.plan.job import plan_job
from rljob_core.plan.job_status import set_conditions
from tests.paths import ROOT
from tests.support.job_simulation import make_job
from tests.support.kstatus import compute_status

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_name_conflict_stays_until_the_object_is_deleted():
    job = make_job()
    made = plan_job(job, ObservedState(), NOW, new_token=lambda: "t")
    taken = conditions.set_name_conflict(made.status, ["Service gsm8k-head"], NOW)
    assert "Service gsm8k-head" in conditions.find(taken, "NameConflict").message
    assert len(conditions.conflict_events(job.status, taken)) == 1
    job.status = taken
    again = plan_job(job, ObservedState(), NOW, new_token=lambda: "t").status
    assert conditions.set_name_conflict(again, ["Service gsm8k-head"], NOW) == taken, (
        "a second reconcile writes nothing"
    )
    assert not conditions.is_true(conditions.set_name_conflict(again, [], NOW), "NameConflict")


def test_name_conflict_condition_stays_last():
    """set_name_conflict appends it: in another place each reconcile would write."""
    status = make_job().status.model_copy(update={"conditions": []})
    built = conditions.build_conditions(
        conditions.set_name_conflict(status, ["Service x"], NOW),
        {conditions.REWARD_VERSIONS_MIXED: ("a", "b")},
        {},
        1,
        NOW,
    )
    stored = conditions.set_name_conflict(status.model_copy(update={"conditions": built}), ["Service x"], NOW)
    assert [c.type for c in stored.conditions] == [c.type for c in built]


OF_PHASE = {
    "Pending": ("Reconciling", "InProgress"),
    "Queued": ("Reconciling", "InProgress"),
    "Restarting": ("Reconciling", "InProgress"),
    "Running": ("Ready", "Current"),
    "Succeeded": ("Ready", "Current"),
    "Failed": ("Stalled", "Failed"),
    "Suspended": (None, "Current"),
}


def build_status(job, phase):
    true = {} if phase == "Pending" else {phase: ("Why", "what happened")}
    return set_conditions(job, job.status, true, {"Running": ("Why", "what happened")}, NOW)


def test_every_phase_is_a_status_of_other_tools():
    assert OF_PHASE.keys() == {*conditions.PHASES, "Pending"}


def test_health_check_of_the_documentation_knows_each_condition():
    text = (ROOT / "docs" / "gitops.md").read_text()
    [table] = re.findall(r"local words = \{(.*?)\}", text, re.DOTALL)
    ended = {"Succeeded", "Failed"}
    assert {*re.findall(r"(\w+) = ", table)} == {conditions.READY, *conditions.ABNORMAL, "Suspended"} | ended


@pytest.mark.parametrize("phase", OF_PHASE)
def test_conditions_that_other_tools_read_follow_from_the_phase(phase):
    job, (holds, expected) = make_job(), OF_PHASE[phase]
    status = build_status(job, phase)
    assert status.phase == phase
    found = {c.type: c for c in status.conditions if c.type in (conditions.READY, *conditions.ABNORMAL)}
    if holds is None:
        assert found == {}
    else:
        assert {type_ for type_, c in found.items() if c.status == "True"} == {holds}
        assert found.keys() == {"Ready", holds}, "kstatus' abnormal conditions are absent, not False"
        assert (found[holds].reason, found[holds].message) == ("Why", "what happened")
    stored = {"metadata": {"generation": 1}, "status": status.to_manifest()}
    assert compute_status(stored) == expected
    assert compute_status(stored | {"metadata": {"generation": 2}}) == "InProgress", "the spec has changed since"


def test_conditions_that_other_tools_read_have_no_event_and_keep_their_time():
    job = make_job()
    job.status = build_status(job, "Running")
    again = set_conditions(job, job.status, {"Running": ("Why", "what happened")}, {}, NOW + timedelta(hours=1))
    assert again.conditions == job.status.conditions
    events = conditions.derive_events(make_job().status, job.status)
    assert [event.reason for event in events] == ["Why"], "of Running"


def test_spec_that_cannot_be_applied_to_a_running_job_is_in_progress():
    job = make_job()
    job.status = build_status(job, "Running")
    job.metadata.generation = 2
    failed = set_reconcile_failed(job, job.status, "Forbidden", "no right to patch jobs", NOW)
    assert compute_status({"metadata": {"generation": 2}, "status": failed.to_manifest()}) == "InProgress"
    again = set_conditions(job, failed, {"Running": ("Why", "what happened")}, {}, NOW)
    assert compute_status({"metadata": {"generation": 2}, "status": again.to_manifest()}) == "Current"
