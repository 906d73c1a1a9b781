"""Stored objects that the operator's types reject: other values, and fields of newer CRDs."""

import copy

import pytest

from rljob_core.backend import InvalidOwnerError, UnknownFieldsError
from rljob_operator.kube.manifests import read_job, read_model, read_policy

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


def test_unknown_fields_of_a_status_stop_all_writes_too():
    with pytest.raises(UnknownFieldsError, match=r"does not know status\.mood"):
        read_job(JOB | {"status": {"mood": "fine"}})


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
