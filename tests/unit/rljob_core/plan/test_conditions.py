"""The condition NameConflict, which is set after a plan was applied, and the phases that other tools read."""

import re
from datetime import UTC, datetime

from rljob_core.backend import ObservedState
from rljob_core.plan import conditions
from rljob_core.plan.job import plan_job
from tests.paths import ROOT
from tests.support.job_simulation import make_job

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


def test_health_checks_of_the_documentation_name_each_phase_once():
    text, phases = (ROOT / "docs" / "gitops.md").read_text(), sorted({*conditions.PHASES, "Pending"})
    [table] = re.findall(r"local phases = \{(.*?)\}", text, re.DOTALL)
    assert sorted(re.findall(r"(\w+) = ", table)) == phases, "of Argo CD"
    flux = text[text.index("healthCheckExprs:") :]
    assert sorted(re.findall(r"'(\w+)'", flux)) == phases, "of Flux"
