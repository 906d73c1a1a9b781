"""Stored objects that the operator's types reject: other values, and fields of newer CRDs."""

import copy

import pytest

from rljob_core.backend import InvalidOwnerError, ObservedState, UnknownFieldsError, utc_now
from rljob_core.children.keep import ANNOTATION_CONFIGURATION
from rljob_core.plan.job import plan_job
from rljob_operator.kube.manifests import read_job, read_model, read_policy
from tests.support.job_simulation import make_job

JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "sums", "namespace": "research", "uid": "u1"},
    "spec": {
        "model": {"source": "hf://a/b"},
        "data": {"train": {"source": "hf://a/b"}},
        "rewards": [{"name": "correct", "function": {"inline": "def reward(): ..."}}],
    },
    "status": {"phase": "Running"},
}
MODEL = JOB | {"kind": "RewardModel", "spec": {"function": {"inline": "def reward(): ..."}}, "status": {"replicas": 2}}
REMEDY = "the CRDs accept it; upgrade the operator to their version, or change the value"


def changed(manifest, **fields):
    manifest = copy.deepcopy(manifest)
    manifest["spec"] |= fields
    return manifest


@pytest.mark.parametrize(("read", "manifest"), [(read_job, JOB), (read_model, MODEL)])
@pytest.mark.parametrize("fields", [{"mood": "grim"}, {"mood": None}, {"tempo": {"kind": "even"}}])
def test_unknown_fields_stop_all_writes_and_name_the_upgrade(read, manifest, fields):
    with pytest.raises(UnknownFieldsError) as raised:
        read(changed(manifest, **fields))
    name = next(iter(fields))
    assert str(raised.value) == (
        f"the CRDs are newer than this operator, which does not know spec.{name}; upgrade the operator: helm upgrade"
    )
    assert raised.value.owner.metadata.uid == "u1"


def test_unknown_fields_of_a_status_are_left_out():
    status = {"phase": "Running", "mood": "fine", "progress": {"tempo": 3, "step": 2}}
    found = read_job(JOB | {"status": status}).status
    assert (found.phase, found.progress.step) == ("Running", 2)
    with pytest.raises(UnknownFieldsError) as raised:
        read_job(changed(JOB, mood="grim") | {"status": status})
    assert raised.value.owner.status == found


def test_an_unknown_field_of_a_status_hides_no_mistake_of_the_spec():
    with pytest.raises(InvalidOwnerError, match=r"spec.schedule.steps must be at least 1"):
        read_job(changed(JOB, schedule={"steps": 0}) | {"status": {"mood": "fine"}})


@pytest.mark.parametrize("status", [{"phase": "Running"}, {"phase": "Unheard"}])
def test_invalid_values_are_reported_together_and_keep_a_readable_status(status):
    fields = {"algorithm": {"type": "none"}, "schedule": {"miniBatches": 0}, "scheduling": {"gang": "volcano"}}
    with pytest.raises(InvalidOwnerError) as raised:
        read_job(changed(JOB, **fields) | {"status": status})
    assert any(p.startswith("spec.scheduling.gang must be one of none, gates, kueue") for p in raised.value.problems)
    assert any(p.startswith("spec.algorithm.type must be one of grpo, drGrpo, ") for p in raised.value.problems)
    assert f"spec.schedule.miniBatches must be at least 1, got 0; {REMEDY}" in raised.value.problems
    assert raised.value.owner.status.phase == ("Running" if status["phase"] == "Running" else "")


def test_invalid_reward_model_keeps_its_status():
    with pytest.raises(InvalidOwnerError, match=r"spec\.replicas must be at least 0") as raised:
        read_model(changed(MODEL, replicas=-1))
    assert raised.value.owner.status.replicas == 2


def test_policy_is_read_or_says_why_not():
    metadata = {"name": "default", "namespace": "research"}
    policy, problem = read_policy({"metadata": metadata, "spec": {"limits": {"gpus": 2}}})
    assert policy is not None
    assert (policy.spec.limits.gpus, problem) == (2, "")
    policy, problem = read_policy({"metadata": metadata, "spec": {"limits": {"tempo": 2}}})
    assert policy is None
    assert problem.startswith(
        "RLJobPolicy research/default has fields that this operator cannot read: spec.limits.tempo;"
    )
    assert read_policy(None) == (None, "")
    assert read_policy({"metadata": metadata | {"deletionTimestamp": "x"}, "spec": {}}) == (None, "")


KEPT = {"checkpoint": {"everySteps": 7}}
"""The defaults of a version in which that of everySteps, now 10, was 7."""


def plan_head(job):
    plan = plan_job(job, ObservedState(), utc_now(), new_token=lambda: "token")
    (head,) = [child for child in plan.children if child["kind"] == "Job"]
    return head["metadata"]["annotations"][ANNOTATION_CONFIGURATION]


def build(checkpoint, **status):
    manifest = make_job().to_manifest(exclude_defaults=True)
    spec = manifest["spec"] | ({"checkpoint": checkpoint} if checkpoint else {})
    return read_job(manifest | {"spec": spec, "status": status})


def test_job_keeps_the_defaults_of_its_start_and_its_head():
    assert build({}).spec.checkpoint.every_steps == 10
    kept = build({}, defaults=KEPT)
    assert kept.spec.checkpoint.every_steps == 7
    assert plan_head(kept) == plan_head(build({})), "the user has changed nothing"


@pytest.mark.parametrize("own", [7, 10, 12])
def test_digest_is_of_what_differs_from_the_defaults_of_the_start(own):
    job = build({"everySteps": own}, defaults=KEPT)
    assert job.spec.checkpoint.every_steps == own
    is_default = plan_head(job) == plan_head(build({}, defaults=KEPT))
    assert is_default is (own == 7)


def test_started_job_records_its_defaults_and_those_of_later_fields():
    plan = plan_job(build({}, defaults=KEPT), ObservedState(), utc_now())
    assert plan.status.defaults["checkpoint"] == {"everySteps": 7, "keep": 2, "asynchronous": "auto"}
    suspended = plan_job(make_job().with_spec(suspend=True), ObservedState(), utc_now())
    assert suspended.status.defaults == {}, "it has not started"
