"""The operator's metrics of autoscaling decisions."""

from rljob_operator.metrics import Metrics


def found(metrics):
    """(name, owner, reward, kind) -> value"""
    samples = [s for f in metrics.registry.collect() if f.name.startswith("rljob_reward_") for s in f.samples]
    return {(s.name, s.labels["owner"], s.labels["reward"], s.labels.get("kind")): s.value for s in samples}


def test_a_decision_is_told_until_its_owner_is_gone():
    metrics = Metrics()
    metrics.record_scaling("team", "sums", "correct", slots=40.5, wanted=3, most=8)
    metrics.record_scaling("team", "sums", "style", slots=1, wanted=1, most=1)
    metrics.record_scaling("team", "other", "correct", slots=2, wanted=1, most=2)
    assert found(metrics)["rljob_reward_slots_wanted", "sums", "correct", None] == 40.5
    assert found(metrics)["rljob_reward_scaling_replicas", "sums", "correct", "max"] == 8
    metrics.forget_scaling("team", "sums")
    assert {owner for _, owner, _, _ in found(metrics)} == {"other"}, "of a job that is gone no demand stays"
    metrics.forget_scaling("team", "never-scaled")
