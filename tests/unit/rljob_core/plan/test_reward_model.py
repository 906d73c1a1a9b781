"""Plans of RewardModels: children, status and events."""

from datetime import UTC, datetime
from functools import partial

import pytest
import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.contract import LABEL_REWARD_MODEL
from rljob_core.backend import ChildKey, ObservedState, key_of
from rljob_core.children.difference import contains, stamp
from rljob_core.plan.job import plan_job
from rljob_core.plan.reward_model import plan_invalid_model, plan_rejected_model, plan_reward_model
from tests.paths import ROOT
from tests.support.kstatus import compute_status

DATA = ROOT / "tests" / "data" / "plan"
NOW = datetime(2026, 1, 2, tzinfo=UTC)
FUNCTION = {"function": {"inline": "def score(sample):\n    return 1.0\n"}, "replicas": 2}


def make_model(spec=FUNCTION):
    metadata = {"name": "judge", "namespace": "ns", "uid": "u", "generation": 3}
    return RewardModel.model_validate({"metadata": metadata, "spec": spec})


def make_observed(model, ready):
    children = {key_of(c): c for c in plan_reward_model(model, ObservedState(), NOW, new_token=lambda: "t").children}
    children[ChildKey("Deployment", "judge-rewardmodel")]["status"] = {"replicas": 2, "readyReplicas": ready}
    return ObservedState(children=children)


def holds(status):
    return {condition.type: (condition.status, condition.reason) for condition in status.conditions}


def test_function_model_has_all_children_with_owner_and_labels():
    children = plan_reward_model(make_model(), ObservedState(), NOW).children
    kinds = ["Secret", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment"]
    assert [child["kind"] for child in children] == kinds
    assert {child["metadata"]["labels"][LABEL_REWARD_MODEL] for child in children} == {"judge"}
    assert {child["metadata"]["ownerReferences"][0]["kind"] for child in children} == {"RewardModel"}


def test_token_is_kept():
    model = make_model()
    first = make_observed(model, 2)
    again = plan_reward_model(model, first, NOW, new_token=lambda: "another")
    secret = next(child for child in again.children if child["kind"] == "Secret")
    known = first.children[ChildKey("Secret", "judge-rewardmodel")]
    assert secret["data"] == known["data"]
    assert "immutable" not in secret
    known["immutable"] = True  # as an earlier version made it
    assert "immutable" in next(c for c in plan_reward_model(model, first, NOW).children if c["kind"] == "Secret")


def test_model_with_some_ready_pods_serves_and_is_degraded():
    status = plan_reward_model(make_model(), make_observed(make_model(), 1), NOW).status
    assert holds(status) == {
        "Ready": ("True", "Serving"),
        "Degraded": ("True", "TooFewReady"),
        "Scaling": ("True", "ScalingUp"),
        "Updating": ("False", "SingleVersion"),
    }
    assert (status.replicas, status.ready_replicas, status.observed_generation) == (2, 1, 3)


def test_http_model_is_ready_and_deletes_earlier_children():
    wanted = plan_reward_model(make_model({"http": {"url": "http://x"}}), make_observed(make_model(), 2), NOW)
    assert (wanted.children, len(wanted.delete)) == ((), 6)
    assert holds(wanted.status)["Ready"] == ("True", "External")


def test_model_pods_equal_job_reward_pods_except_names_labels_and_token():
    job = RLJob.model_validate(yaml.safe_load((DATA / "smallest" / "job.yaml").read_text()))
    reward = job.spec.rewards[0]
    model = make_model({"function": reward.function.to_manifest()})
    made = plan_job(job, ObservedState(), NOW).children
    theirs = {child["kind"]: child for child in made if child["metadata"]["name"] == "gsm8k-reward-correct"}
    ours = {c["kind"]: c for c in plan_reward_model(model, ObservedState(), NOW).children}
    mine, other = (by["Deployment"]["spec"]["template"]["spec"] for by in (ours, theirs))
    assert {k: v for k, v in mine.items() if k not in ("containers", "volumes")} == {
        k: v for k, v in other.items() if k not in ("containers", "volumes")
    }
    assert mine["containers"][0] | {"env": []} == other["containers"][0] | {"env": []}
    assert set(theirs) <= set(ours)


@pytest.mark.parametrize(
    ("function", "ports"),
    [({}, []), ({"network": True}, ["all"]), ({"requirements": ["math-verify"]}, [[443, 8000]])],
)
def test_network_policy_allows_function_egress_and_monitoring(function, ports):
    function = FUNCTION["function"] | function
    model = make_model({"function": function, "env": {"UV_INDEX_URL": "http://index:8000/simple"}})
    policy = next(c for c in plan_reward_model(model, ObservedState(), NOW).children if c["kind"] == "NetworkPolicy")
    opened = [[p["port"] for p in rule["ports"]] if "ports" in rule else "all" for rule in policy["spec"]["egress"]]
    assert opened[-1:] == ports, "with DNS before it where names are looked up"
    assert len(policy["spec"]["ingress"]) == 2


def test_invalid_template_is_reported_and_children_stay():
    model = make_model(FUNCTION | {"template": {"spec": {"containers": [{"image": "nameless"}]}}})
    wanted = plan_reward_model(model, make_observed(make_model(), 2), NOW)
    assert (wanted.children, wanted.delete) == ((), ())
    assert holds(wanted.status)["Ready"] == ("False", "InvalidSpec")
    assert [event.type for event in wanted.events] == ["Warning"]
    assert "spec.template" in wanted.events[0].message


EARLIER = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RewardModel", "name": "judge", "uid": "1", "controller": True}


@pytest.mark.parametrize(
    ("change", "deletes"),
    [
        ({"ownerReferences": [{"uid": "someone's"}]}, False),
        ({"ownerReferences": [EARLIER]}, True),
        ({"ownerReferences": [EARLIER | {"kind": "RLJob"}]}, False),
        ({"deletionTimestamp": "2026-01-02T00:00:00Z"}, False),
    ],
)
def test_no_pod_starts_before_an_earlier_secret_is_deleted(change, deletes):
    observed = make_observed(make_model(), 0)
    key = ChildKey("Secret", "judge-rewardmodel")
    secret = observed.children[key]
    children = observed.children | {key: secret | {"metadata": secret["metadata"] | change}}
    wanted = plan_reward_model(make_model(), ObservedState(children=children), NOW)
    assert not {"Secret", "Deployment"} & {child["kind"] for child in wanted.children}
    assert wanted.delete == ((key,) if deletes else ()), "only an earlier model's is deleted"
    assert wanted.requeue_after_seconds == 1.0
    assert holds(wanted.status)["Ready"] == ("False", "WaitingForDeletion")


def reconcile(model, children, rejected=""):
    """Plan, apply everything unless `rejected`, and store the status. Returns the plan and the model."""
    observed = ObservedState(children=children)
    made = plan_reward_model(model, observed, NOW, new_token=lambda: "t")
    if rejected:
        made = plan_rejected_model(model, observed, rejected, NOW)
    else:
        children |= {key_of(child): stamp(child) for child in made.children}
    return made, model.model_copy(update={"status": made.status})


def test_rejected_child_is_reported_once_and_retried():
    children = {}
    made, model = reconcile(make_model(), children, "ConfigMap judge-rewardmodel was refused: taken")
    assert holds(model.status)["Ready"] == ("False", "Refused")
    assert made.requeue_after_seconds == 30.0, "no watch event reports that another owner's object was deleted"
    assert [event.reason for event in made.events] == ["Refused"]
    again, model = reconcile(model, children, "ConfigMap judge-rewardmodel was refused: taken")
    assert (again.events, again.status) == ((), made.status)
    _, model = reconcile(model, children)
    assert holds(model.status)["Ready"] == ("False", "WaitingForPods")


def test_second_reconcile_writes_nothing():
    children = {}
    _, model = reconcile(make_model(), children)
    before = dict(children)
    made, again = reconcile(model, children)
    assert all(contains(before[key_of(child)], stamp(child)) for child in made.children)
    assert (made.delete, made.events, again.status) == ((), (), model.status)


def test_unreadable_spec_is_reported_once_and_keeps_other_conditions():
    _, model = reconcile(make_model(), {})
    made = plan_invalid_model(model, ["spec.slots must be at least 1, got 0"], NOW)
    assert (made.children, made.delete) == ((), ())
    assert [(event.type, event.reason) for event in made.events] == [("Warning", "InvalidSpec")]
    expected = holds(model.status) | {"Ready": ("False", "InvalidSpec"), "Stalled": ("True", "InvalidSpec")}
    del expected["Reconciling"]
    assert holds(made.status) == expected
    again = plan_invalid_model(
        model.model_copy(update={"status": made.status}), ["spec.slots must be at least 1, got 0"], NOW
    )
    assert (again.events, again.status) == ((), made.status)


@pytest.mark.parametrize(
    ("ready", "rejected", "status", "holds_too"),
    [
        (0, "", "InProgress", {"Reconciling"}),
        (1, "", "Current", set()),
        (1, "an object of that name exists", "Failed", {"Stalled"}),
    ],
)
def test_tools_read_the_conditions_of_kstatus(ready, rejected, status, holds_too):
    model = make_model()
    observed = make_observed(model, ready)
    plan = partial(plan_rejected_model, rejected=rejected) if rejected else plan_reward_model
    made = plan(model, observed, now=NOW)
    stored = {"metadata": {"generation": model.metadata.generation}, "status": made.status.to_manifest()}
    assert compute_status(stored) == status
    assert {c.type for c in made.status.conditions} & {"Reconciling", "Stalled"} == holds_too, "absent, not False"
    reported = {event.message for event in made.events}
    assert len(reported) == len(made.events), "each reason has one event, although two conditions have it"
