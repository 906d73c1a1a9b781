"""The operator's metrics of jobs, their phases, and autoscaling decisions."""

import re
from datetime import UTC, datetime

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.manifest.status import Condition, HungPartStatus, OutageStatus
from rljob_core.backend import JobKey, RewardModelKey
from rljob_operator.metrics import OperatorMetrics
from tests.paths import ROOT

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


def make_job_in(phase, reason=""):
    job = make_job()
    job.status.phase = phase
    if reason:
        time = datetime(2026, 1, 1, tzinfo=UTC)
        job.status.conditions = [Condition(type="Failed", status="True", reason=reason, last_transition_time=time)]
    return job


def find_samples(metrics, name):
    found = [s for f in metrics.registry.collect() for s in f.samples if s.name == name]
    return sorted((tuple(s.labels.values()), s.value) for s in found)


def find_failures(metrics):
    """Return {reason: failures} without zeros."""
    return {reason: value for (reason,), value in find_samples(metrics, "rljob_job_failures_total") if value}


def test_each_job_has_one_series_with_its_phase():
    metrics = OperatorMetrics()
    for phase in ("", "Queued", "Running"):
        metrics.record_owner(SUMS, make_job_in(phase))
    metrics.record_owner(JobKey("team", "new"), make_job_in(""))
    metrics.record_owner(JobKey("other", "sums"), make_job_in("Queued"))
    metrics.record_owner(MATH, make_model())
    assert find_samples(metrics, "rljob_job_phase") == [
        (("other", "sums", "Queued"), 1),
        (("team", "new", "Pending"), 1),
        (("team", "sums", "Running"), 1),
    ]
    metrics.record_owner(SUMS, None)
    metrics.record_owner(JobKey("team", "new"), None)
    assert find_samples(metrics, "rljob_job_phase") == [(("other", "sums", "Queued"), 1)]


def test_reasons_of_a_job_without_progress_are_exported_while_they_last():
    metrics, time = OperatorMetrics(), datetime(2026, 1, 1, tzinfo=UTC)
    job = make_job_in("Running")
    job.status.progress.hung = [HungPartStatus(role="trainer", name="rank 3", since=time)]
    job.status.progress.outages = [OutageStatus(what="judge", since=time)]

    def record(status, reason):
        job.status.conditions = [Condition(type="Progressing", status=status, reason=reason, last_transition_time=time)]
        metrics.record_owner(SUMS, job)
        return [reason for (_, _, reason), _ in find_samples(metrics, "rljob_job_stalled")]

    reasons = ["PartHung", "ProgressDeadlineExceeded", "WaitsForOutage"]
    assert record("False", "ProgressDeadlineExceeded") == reasons
    assert record("Unknown", "HeadNotReady") == [], "what the driver said last may be over"
    assert record("Unknown", "DriverSilent") == ["DriverSilent"]
    assert record("False", "PartHung") == ["PartHung", "WaitsForOutage"]
    metrics.record_owner(SUMS, None)
    assert find_samples(metrics, "rljob_job_stalled") == []


def test_phase_of_a_job_with_an_invalid_spec_is_recorded():
    metrics, job = OperatorMetrics(), make_job_in("Failed", "InvalidSpec")
    metrics.record_owner(SUMS, make_job_in("Pending"))
    metrics.record_owner(SUMS, RLJob.model_construct(metadata=job.metadata, status=job.status))
    assert find_samples(metrics, "rljob_job_phase") == [(("team", "sums", "Failed"), 1)]
    assert find_failures(metrics) == {"InvalidSpec": 1}


def test_a_failure_is_counted_once_by_its_reason():
    metrics = OperatorMetrics()
    metrics.record_owner(JobKey("team", "old"), make_job_in("Failed", "UserError"))
    assert find_failures(metrics) == {}, "it failed before this process started"
    for _ in range(2):
        metrics.record_owner(SUMS, make_job_in("Running"))
        for _ in range(2):
            metrics.record_owner(SUMS, make_job_in("Failed", "UserError"))
    assert find_failures(metrics) == {"UserError": 2}


def test_reasons_are_those_of_the_documentation_and_exported_from_the_start():
    [row] = re.findall(r"^\| Failed \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs" / "lifecycle.md").read_text(), re.M)
    documented = row.strip().split(", ")
    samples = find_samples(OperatorMetrics(), "rljob_job_failures_total")
    assert samples == [((reason,), 0) for reason in sorted(documented)]


def test_api_calls_are_counted_by_resource():
    metrics = OperatorMetrics(["rljobs", "pods"])
    metrics.on_response("PATCH", "/apis/rljob.dev/v1alpha1/namespaces/pods/rljobs/a/status", 200)
    metrics.on_response("GET", "/version", 0)
    samples = [s for f in metrics.registry.collect() for s in f.samples if s.name == "rljob_operator_api_calls_total"]
    assert {(s.labels["verb"], s.labels["resource"], s.labels["code"]) for s in samples} == {
        ("PATCH", "rljobs", "200"),
        ("GET", "other", "0"),
    }
