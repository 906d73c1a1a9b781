"""Each cause of waiting is told apart, names the field to change, and is told once."""

from datetime import UTC, datetime

import pytest

from rljob_api.job import RLJob
from rljob_operator import conditions
from rljob_operator.backend import Observed
from rljob_operator.isolation import judge_isolation
from rljob_operator.plan import plan
from rljob_operator.remedies import find_causes
from rljob_operator.world import observe_world

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make_job(**spec):
    base = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/d.jsonl"}},
        "rewards": [{"name": "correct", "function": {"inline": "def reward(): ..."}}],
    }
    return RLJob.model_validate({"metadata": {"name": "gsm8k", "uid": "u1"}, "spec": base | spec})


def make_pod(role="rollout", node="", **status):
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
    return {"metadata": {"name": f"gsm8k-{role}-x", "labels": labels}, "spec": {"nodeName": node}, "status": status}


def causes(job, *pods, **observed):
    seen = Observed(pods=pods, **observed)
    return find_causes(job, observe_world(job, seen), seen)


def unscheduled(message):
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


@pytest.mark.parametrize(
    ("status", "reason", "field"),
    [
        (
            {"containerStatuses": [{"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
            "OOMKilled",
            "spec.rollout.resources.limits.memory",
        ),
        ({"phase": "Failed", "reason": "Evicted"}, "Evicted", "not counted"),
        ({"conditions": [{"type": "DisruptionTarget", "status": "True"}]}, "Evicted", "not counted"),
        (
            {"containerStatuses": [{"image": "x", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
            "ImagePull",
            "spec.rollout.image",
        ),
        ({"conditions": unscheduled("0/3 nodes")}, "Unschedulable", "spec.rollout.nodePool"),
        (
            {"conditions": unscheduled('persistentvolumeclaim "runs" not found')},
            "VolumeUnbound",
            "spec.checkpoint.persistentVolumeClaim",
        ),
    ],
)
def test_a_pods_cause_names_its_remedy(status, reason, field):
    (cause,) = causes(make_job(), make_pod(**status))
    assert cause.reason == reason
    assert field in cause.words


def test_a_quota_is_named_without_the_pods_that_come_and_go():
    def warning(pod, used):
        message = f'Error creating: pods "{pod}" is forbidden: exceeded quota: q, requested: cpu=1, used: cpu={used}'
        return {"reason": "FailedCreate", "message": message, "involvedObject": {"name": "gsm8k-rollout-7d9f"}}

    first, second = (causes(make_job(), warnings=(warning(p, u),)) for p, u in (("a", 1), ("b", 2)))
    assert first == second
    assert first[0].reason == "QuotaExceeded"
    assert "quota q has no room for cpu=1" in first[0].words


def test_a_missing_reward_model_is_told_once_and_in_the_condition():
    job = make_job(rewards=[{"name": "style", "rewardModelRef": {"name": "judge"}}])
    made = plan(job, Observed(), NOW, new_token=lambda: "t")
    assert [event.reason for event in made.events] == ["RewardModelMissing"]
    assert "spec.rewards[0].rewardModelRef" in conditions.find(made.status, "Running").message
    job.status = made.status
    assert plan(job, Observed(), NOW, new_token=lambda: "t").events == ()


def test_two_roles_on_one_node_break_the_isolation_that_one_asked_for():
    job = make_job(rollout={"nodePool": {"exclusive": True}})
    trainer, rollout = make_pod("trainer", "n1"), make_pod("rollout", "n1")
    assert judge_isolation(observe_world(job, Observed(pods=(trainer, rollout))))[0] is False
    assert "node n1" in judge_isolation(observe_world(job, Observed(pods=(trainer, rollout))))[2]
    apart = make_pod("rollout", "n2")
    assert judge_isolation(observe_world(job, Observed(pods=(trainer, apart))))[0] is True
    assert judge_isolation(observe_world(job, Observed())) is None
    assert judge_isolation(observe_world(make_job(), Observed(pods=(trainer, rollout)))) is None


def test_a_name_conflict_stays_until_the_object_goes():
    job = make_job()
    made = plan(job, Observed(), NOW, new_token=lambda: "t")
    taken = conditions.with_conflicts(made.status, ["Service gsm8k-head"], NOW)
    assert "Service gsm8k-head" in conditions.find(taken, "NameConflict").message
    assert len(conditions.conflict_events(job.status, taken)) == 1
    job.status = taken
    again = plan(job, Observed(), NOW, new_token=lambda: "t").status
    assert conditions.with_conflicts(again, ["Service gsm8k-head"], NOW) == taken, "a second look writes nothing"
    assert not conditions.is_true(conditions.with_conflicts(again, [], NOW), "NameConflict")
