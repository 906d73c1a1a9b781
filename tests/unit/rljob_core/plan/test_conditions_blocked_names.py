"""What is said about names that other objects have: objects without an owner come with the command."""

import pytest

from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ObservedState, key_of
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.plan import conditions
from rljob_core.plan.conditions import describe_blocked
from rljob_core.plan.job import plan_job, render_children
from tests.support.job_simulation import START, make_job

JOB = make_job()
COMMAND = "kubectl delete {} -n default -l rljob.dev/job=gsm8k"


def build(kinds, change):
    """Children of an earlier job with this name, of some kinds."""
    found = [child for child in render_children(JOB, "t") if child["kind"] in kinds]
    for child in found:
        change(child["metadata"])
    return ObservedState({key_of(child): child for child in found})


def orphan(metadata):
    metadata.pop("ownerReferences", None)


def outlive(metadata):
    metadata["ownerReferences"][0]["uid"] = "earlier"


def end(metadata):
    outlive(metadata)
    metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize("change", [outlive, end])
def test_what_is_deleted_by_others_is_only_waited_for(change):
    state = build(["Job"], change)
    assert describe_blocked(JOB, state, list(state.children)) == "waits until an earlier Job gsm8k-head is deleted"


def test_objects_without_an_owner_come_with_the_command():
    state = build(["Job", "ConfigMap"], orphan)
    assert describe_blocked(JOB, state, sorted(state.children)[:2]) == (
        "waits until an earlier ConfigMap gsm8k-config, ConfigMap gsm8k-reward-correct is deleted; nothing deletes "
        "ConfigMap gsm8k-config, ConfigMap gsm8k-reward-correct, since this RLJob is not the owner: "
        + COMMAND.format("configmap")
    )


def test_many_names_are_counted_and_the_status_has_the_command():
    state = build([child["kind"] for child in render_children(JOB, "t")], orphan)
    plan = plan_job(JOB, state, START, new_token=lambda: "t")
    message = conditions.find(plan.status, conditions.RUNNING).message
    assert " and 10 more is deleted; " in message
    assert message.endswith("deployment,job,networkpolicy,poddisruptionbudget,secret,service,statefulset "
                            "-n default -l rljob.dev/job=gsm8k")  # fmt: skip
    assert not plan.delete, "they may be in use"
    assert not any(child["kind"] in WORKLOAD_KINDS for child in plan.children)


def test_model_is_named_by_its_label():
    model = RewardModel.model_validate(
        {"metadata": {"name": "judge", "uid": "u"}, "spec": {"function": {"inline": "x"}}}
    )
    state = build(["ConfigMap"], orphan)
    assert describe_blocked(model, state, list(state.children)[:1]).endswith(
        ", since this RewardModel is not the owner: kubectl delete configmap -n default -l rljob.dev/reward-model=judge"
    )
