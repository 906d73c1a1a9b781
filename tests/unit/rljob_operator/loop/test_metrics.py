"""The operator's metrics of autoscaling decisions."""

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_operator.backend import JobKey, RewardModelKey
from rljob_operator.loop.metrics import OperatorMetrics

SUMS, MATH = JobKey("team", "sums"), RewardModelKey("team", "math")


def make_job(*scaling):
    rewards = [
        {"name": "correct", "function": {"inline": "x"}, "autoscaling": {"maxReplicas": 8}},
        {"name": "style", "function": {"inline": "x"}, "autoscaling": {"maxReplicas": 2}},
        {"name": "fixed", "function": {"inline": "x"}},
    ]
    spec = {"model": {"source": "/m"}, "data": {"train": {"source": "/t"}}, "rewards": rewards}
    return RLJob.model_validate({"metadata": {"name": "sums"}, "spec": spec, "status": {"scaling": list(scaling)}})


def make_model():
    spec = {"function": {"inline": "x"}, "autoscaling": {"maxReplicas": 4}}
    status = {"scaling": {"name": "math", "slots": 9, "replicas": 1}}
    return RewardModel.model_validate({"metadata": {"name": "math"}, "spec": spec, "status": status})


def found(metrics):
    """(name, owner, reward, kind) -> value"""
    samples = [s for f in metrics.registry.collect() if f.name.startswith("rljob_reward_") for s in f.samples]
    return {(s.name, s.labels["owner"], s.labels["reward"], s.labels.get("kind")): s.value for s in samples}


CORRECT = {"name": "correct", "slots": 40, "replicas": 3}
STYLE = {"name": "style", "slots": 1, "replicas": 1}


def test_scaling_decisions_of_jobs_and_reward_models_are_exported():
    metrics = OperatorMetrics()
    metrics.record_owner(SUMS, make_job(CORRECT))
    metrics.record_owner(MATH, make_model())
    assert found(metrics) == {
        ("rljob_reward_slots_wanted", "sums", "correct", None): 40,
        ("rljob_reward_scaling_replicas", "sums", "correct", "wanted"): 3,
        ("rljob_reward_scaling_replicas", "sums", "correct", "max"): 8,
        ("rljob_reward_slots_wanted", "rewardmodel/math", "math", None): 9,
        ("rljob_reward_scaling_replicas", "rewardmodel/math", "math", "wanted"): 1,
        ("rljob_reward_scaling_replicas", "rewardmodel/math", "math", "max"): 4,
    }, "a reward of fixed size, or without a decision yet, is in none"


def test_metrics_of_deleted_or_fixed_size_rewards_are_removed():
    metrics = OperatorMetrics()
    metrics.record_owner(SUMS, make_job(CORRECT, STYLE))
    metrics.record_owner(MATH, make_model())
    metrics.record_owner(SUMS, make_job(STYLE))
    assert {(owner, reward) for _, owner, reward, _ in found(metrics)} == {
        ("sums", "style"),
        ("rewardmodel/math", "math"),
    }
    metrics.record_owner(SUMS, None)
    metrics.record_owner(JobKey("team", "math"), None)
    assert {owner for _, owner, _, _ in found(metrics)} == {"rewardmodel/math"}, (
        "a job of that name is a different object"
    )


def test_api_calls_are_counted_by_resource():
    metrics = OperatorMetrics(["rljobs", "pods"])
    metrics.on_response("PATCH", "/apis/rljob.dev/v1alpha1/namespaces/pods/rljobs/a/status", 200)
    metrics.on_response("GET", "/version", 0)
    samples = [s for f in metrics.registry.collect() for s in f.samples if s.name == "rljob_operator_api_calls_total"]
    assert {(s.labels["verb"], s.labels["resource"], s.labels["code"]) for s in samples} == {
        ("PATCH", "rljobs", "200"),
        ("GET", "other", "0"),
    }
