"""Explanations of observations, without a cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rljob_cli.cluster.client import ClusterError
from rljob_cli.cluster.explain import _list_commands, explain
from rljob_cli.cluster.explanation import format_explanation
from rljob_cli.cluster.observation import JobObservation, fetch_observation
from rljob_core.backend import utc_now
from rljob_core.plan.causes import REMEDIES

INLINE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
NOW = "2026-01-01T00:00:00Z"


def job(type_: str = "Running", status: str = "True", reason: str = "R", message: str = "m", **spec: Any) -> Any:
    phase = type_ if status == "True" else "Pending"
    condition = {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": NOW}
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"namespace": "ns", "name": "sums", "generation": 1, "creationTimestamp": NOW},
        "spec": {
            "model": {"source": "pvc://models/a"},
            "data": {"train": {"source": "hf://o/d"}},
            "rewards": [{"name": "correct", "function": {"inline": INLINE}}],
            **spec,
        },
        "status": {"phase": phase, "observedGeneration": 1, "conditions": [condition]},
    }


def pod(name: str, role: str, reason: str, **extra: Any) -> Any:
    state = {"waiting": {"reason": reason, "message": "m"}}
    status = {"name": role, "image": "there/is:none", "restartCount": 0, "state": state}
    labels = {"rljob.dev/job": "sums", "rljob.dev/role": role}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": role}], "nodeName": "n"},
        "status": {"containerStatuses": [status]},
        **extra,
    }


def test_image_pull_error_leads_to_the_field_and_the_editor() -> None:
    observation = JobObservation(job(status="False"), [pod("sums-rollout-a", "rollout", "ImagePullBackOff")])
    found = explain(observation)
    assert any("correct spec.rollout.image" in remedy for remedy in found.remedies)
    assert found.next == ["kubectl edit rljob sums -n ns"]


def test_lost_node_leads_to_the_commands_that_release_its_pod() -> None:
    conditions = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    trainer = pod("sums-trainer-0", "trainer", "", status={"conditions": conditions})
    trainer["metadata"] |= {"deletionTimestamp": NOW}
    found = explain(JobObservation(job("Restarting", message="waits"), [trainer]))
    (remedy,) = found.remedies
    assert remedy.startswith("trainer: Pod sums-trainer-0 is stuck in Terminating on node n, which does not answer")
    assert found.next == [
        "kubectl describe node n",
        "kubectl taint nodes n node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
    ]
    at = datetime(2026, 1, 1, 0, 0, 9, tzinfo=UTC)
    found = explain(JobObservation(job("Restarting"), [trainer], observed_at=at))
    assert found.remedies == [], "the grace period has just ended"


def test_avoided_node_is_explained_with_the_command_that_uses_it_again() -> None:
    manifest = job()
    avoided = {
        "role": "trainer",
        "node": "n2",
        "pod": "sums-trainer-1",
        "message": "CUDA error: uncorrectable ECC error",
    }
    manifest["status"]["avoidedNodes"] = [avoided]
    (remedy,) = explain(JobObservation(manifest, [])).remedies
    assert remedy == (
        "trainer: node n2 has a broken GPU (Pod sums-trainer-1: CUDA error: uncorrectable ECC error); see kubectl "
        "describe node n2, and cordon or repair it; trainer avoids it until kubectl rljob restart --role trainer"
    )


def test_job_that_learns_nothing_is_explained_with_the_exceptions_of_its_reward() -> None:
    manifest = job()
    manifest["status"]["conditions"] += [
        {"type": "Learning", "status": "False", "reason": "NoAdvantages", "message": "why", "lastTransitionTime": NOW}
    ]
    problem = {"reward": "correct", "reason": "exception", "message": "f.py:3: KeyError: 'a'", "step": 2}
    manifest["status"]["progress"] = {"step": 5, "totalSteps": 9, "problems": [problem]}
    found = explain(JobObservation(manifest, []))
    assert ("Learning is false (NoAdvantages)", "why") in found.conditions
    text = format_explanation(found, utc_now())
    assert "Samples without a valid score\n  correct: exception, first in step 2: f.py:3: KeyError: 'a'" in text
    assert found.to_json()["invalid_samples"][0]["first_step"] == 2


def test_damaged_checkpoint_is_named_and_no_sample() -> None:
    manifest = job()
    problem = {"reward": "spec.checkpoint", "reason": "damaged", "message": "driver.json has ...", "step": 2}
    manifest["status"]["progress"] = {"step": 5, "totalSteps": 9, "problems": [problem]}
    found = explain(JobObservation(manifest, []))
    assert "Damaged checkpoints\n  driver.json has ..." in format_explanation(found, utc_now())
    assert found.to_json()["invalid_samples"] == []


def test_every_cause_of_the_operator_leads_to_a_command() -> None:
    observation = JobObservation(job())
    led = {*REMEDIES} & {*_list_commands(observation)}
    assert set(REMEDIES) - led == {"Evicted", "FunctionFailed"}, "nothing to do, and only of RewardModels"


def test_reward_model_is_missing_only_if_the_list_was_readable() -> None:
    using = job(rewards=[{"name": "style", "rewardModelRef": {"name": "judge"}}])
    newer = {"metadata": {"name": "judge"}, "spec": {"novelty": 1}}
    missing = "reward style: RewardModel judge does not exist"
    assert any(missing in remedy for remedy in explain(JobObservation(using)).remedies)
    for observation in (
        JobObservation(using, reward_models=[newer]),
        JobObservation(using, reward_models=None),
    ):
        assert not any(missing in remedy for remedy in explain(observation).remedies)


def test_remedy_is_reported_once() -> None:
    message = "waits for 1 Pod; rollout: image there/is:none cannot be pulled; correct spec.rollout.image, or name a "
    message += "Secret in spec.imagePullSecrets"
    observation = JobObservation(
        job(status="False", message=message), [pod("sums-rollout-a", "rollout", "ErrImagePull")]
    )
    text = " ".join(format_explanation(explain(observation), utc_now()).split())
    assert text.count("imagePullSecrets") == 1
    assert "waits for 1 Pod" in text


@pytest.mark.parametrize(
    ("reason", "last"),
    [("InvalidSpec", "kubectl edit rljob sums -n ns"), ("UserError", "kubectl rljob resume --retry sums -n ns")],
)
def test_only_a_failure_that_a_retry_can_fix_leads_to_retry(reason: str, last: str) -> None:
    assert explain(JobObservation(job("Failed", reason=reason))).next[-1] == last


def test_retry_without_a_checkpoint_volume_restarts_at_step_0() -> None:
    assert "restarts at step 0" in explain(JobObservation(job("Failed", reason="HeadFailed"))).remedies[0]
    for kept in ({"persistentVolumeClaim": {"claimName": "models"}}, {"storage": "s3://bucket/runs"}):
        kept_job = job("Failed", reason="HeadFailed", checkpoint=kept)
        assert "from its last checkpoint" in explain(JobObservation(kept_job)).remedies[0]


def test_job_of_another_controller_gets_no_commands() -> None:
    found = explain(JobObservation(job(managedBy="kueue.x-k8s.io/multikueue")))
    assert "multikueue" in found.why
    assert not found.next


def test_spec_that_was_not_reconciled_is_reported() -> None:
    manifest = job()
    manifest["metadata"]["generation"] = 2
    assert "the operator has not observed generation 2 of this job" in explain(JobObservation(manifest)).why


def test_job_that_was_not_reconciled_leads_to_the_operators_pods() -> None:
    manifest = job()
    manifest["status"] = {}
    found = explain(JobObservation(manifest))
    assert "it is lagging, or not running" in found.why
    assert found.next == ["kubectl get pods -A -l app.kubernetes.io/name=rljob-operator"]


def test_job_of_a_newer_version_is_explained_by_its_status() -> None:
    manifest = job(novelty=1)
    manifest["status"] |= {"roles": [{"name": "head", "desired": 1, "ready": 1}], "novelty": 1}
    found = explain(JobObservation(manifest))
    assert [role.name for role in found.roles] == ["head"]
    assert found.unreadable[0].startswith("spec.novelty: fields that this version of rljob does not know")


def test_phase_of_a_newer_operator_is_shown_as_it_is() -> None:
    manifest = job()
    manifest["status"]["phase"] = "Paused"
    assert explain(JobObservation(manifest)).phase == "Paused", "and not as one that was never reconciled"


async def test_warnings_of_an_earlier_job_and_of_other_jobs_are_excluded() -> None:
    class FakeCluster:
        async def get_job(self, name: str) -> Any:
            return job()

        async def list_pods(self, selector: str) -> Any:
            volumes = [{"name": "tmp", "emptyDir": {}}, {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}}]
            return [pod("sums-head-a", "head", "CrashLoopBackOff", spec={"volumes": volumes})]

        async def list_warnings(self) -> Any:
            names = ("sums-head-a", "2026-01-02"), ("sums-head-a", "2025-12-31"), ("tens-head-a", "2026-01-02")
            found = [("Pod", *each) for each in names]
            found += [("PersistentVolumeClaim", name, "2026-01-01") for name in ("runs", "others")]
            return [
                {"involvedObject": {"kind": kind, "name": n}, "metadata": {}, "lastTimestamp": f"{day}T00:00:00Z"}
                for kind, n, day in found
            ]

        async def list_workloads(self, selector: str) -> Any:
            return []

        async def list_reward_models(self) -> Any:
            raise ClusterError("forbidden: list rewardmodels")

    observation = await fetch_observation(FakeCluster(), "sums")  # type: ignore[arg-type]
    warnings = [(w["involvedObject"]["name"], w["lastTimestamp"][:10]) for w in observation.warnings]
    assert warnings == [("sums-head-a", "2026-01-02"), ("runs", "2026-01-01")]
    assert (observation.reward_models, observation.unreadable) == (None, ["forbidden: list rewardmodels"])


def test_wrapped_lines_are_indented_below_what_they_continue() -> None:
    message = "waits for 1 of 2 rollout Pods: sums-rollout-a: Unschedulable: 0/3 nodes are available"
    text = format_explanation(explain(JobObservation(job(status="False", message=message))), utc_now(), 60)
    assert "\n  waits for 1 of 2 rollout Pods: sums-rollout-a:\n    Unschedulable: 0/3 nodes are available\n" in text


def test_roles_have_the_images_that_they_run() -> None:
    manifest = job()
    images = {"head": "rljob/trainer:0.1.0", "rollout": "rljob/trainer:0.2.0"}
    manifest["status"]["roles"] = [{"name": name, "desired": 1, "image": image} for name, image in images.items()]
    found = explain(JobObservation(manifest))
    assert {role.name: role.image for role in found.roles if role.image} == images
    lines = format_explanation(found, utc_now()).splitlines()
    assert any(line.split() == ["head", "0/1", "ready", "rljob/trainer:0.1.0"] for line in lines)


def test_a_service_is_explained_by_whom_it_serves() -> None:
    manifest = job(data=None, rewards=[], service={})
    manifest["status"]["progress"] = {"phase": "serving", "waitsFor": "2 clients, 3 adapters, 1 busy"}
    assert explain(JobObservation(manifest)).progress == "serves 2 clients, 3 adapters, 1 busy"
    manifest["status"]["phase"] = "Suspended"
    assert explain(JobObservation(manifest)).progress == ""


def test_job_without_progress_names_who_hangs_since_when_and_what_is_done() -> None:
    manifest = job(message="all Pods are ready")
    message = "trainer: rank 3 hangs since 2026-01-01T00:00:00Z (limit 60 s); update; it is replaced"
    stalled = {"type": "Progressing", "status": "False", "reason": "PartHung", "message": message}
    manifest["status"]["conditions"].append(stalled | {"lastTransitionTime": NOW})
    manifest["status"]["progress"] = {
        "step": 4,
        "totalSteps": 9,
        "lastStepTime": NOW,
        "trainingShare": 0.93,
        "hung": [{"role": "trainer", "name": "rank 3", "since": NOW, "limitSeconds": 60}],
    }
    at = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
    found = explain(JobObservation(manifest, [], observed_at=at))
    assert found.progress == "step 4/9, the last one 10m ago, trained in 93% of its time"
    assert found.stalls == ["trainer: rank 3 hangs for 10m (limit 60 s)"]
    assert found.conditions == [("Progressing is false (PartHung)", message)]
    assert found.next == ["kubectl rljob logs sums -n ns --role trainer"]
    text = " ".join(format_explanation(found, at).split())
    assert "rank 3 hangs for 10m" in text
    assert message in text
