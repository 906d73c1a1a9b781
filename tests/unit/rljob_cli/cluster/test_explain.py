"""What explain makes of a look, without a cluster: the cases that a real one is slow to show."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_cli.cluster.explain import _command_of, explain, format_explanation
from rljob_cli.cluster.observation import JobObservation, fetch_observation, name_claims
from rljob_operator.backend import utc_now
from rljob_operator.plan.causes import REMEDIES, Cause

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
    state = {"waiting": {"reason": reason, "message": "said"}}
    status = {"name": role, "image": "there/is:none", "restartCount": 0, "state": state}
    labels = {"rljob.dev/job": "sums", "rljob.dev/role": role}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": role}], "nodeName": "n"},
        "status": {"containerStatuses": [status]},
        **extra,
    }


def claim(phase: str) -> Any:
    return {"metadata": {"name": "models"}, "status": {"phase": phase}}


def test_an_image_that_cannot_be_pulled_leads_to_the_field_and_the_editor() -> None:
    look = JobObservation(
        job(status="False"), [pod("sums-rollout-a", "rollout", "ImagePullBackOff")], claims=[claim("Bound")]
    )
    found = explain(look)
    assert any("correct spec.rollout.image" in words for words in found.remedies)
    assert found.next == ["kubectl edit rljob sums -n ns"]


def test_a_claim_that_is_not_bound_is_named_with_its_state() -> None:
    found = explain(JobObservation(job(status="False"), claims=[claim("Pending")]))
    assert any("PersistentVolumeClaim models is Pending" in words for words in found.remedies)
    assert "kubectl describe pvc models -n ns" in found.next


def test_every_cause_that_the_operator_tells_leads_to_a_command() -> None:
    look, edit = JobObservation(job(), claims=[claim("Pending")]), "kubectl edit rljob sums -n ns"
    led = {reason for reason in REMEDIES if _command_of(Cause(reason, ""), look, edit)}
    assert set(REMEDIES) - led == {"Evicted", "FunctionFailed"}, "nothing to do, and a RewardModel's alone"


def test_nothing_is_said_of_claims_that_could_not_be_read() -> None:
    assert not explain(JobObservation(job(), claims=None)).remedies


def test_a_reward_model_is_missing_only_when_it_is_known_not_to_be_there() -> None:
    using = job(rewards=[{"name": "style", "rewardModelRef": {"name": "judge"}}])
    newer = {"metadata": {"name": "judge"}, "spec": {"novelty": 1}}
    missing = "reward style: RewardModel judge does not exist"
    assert any(missing in words for words in explain(JobObservation(using, claims=None)).remedies)
    for look in (
        JobObservation(using, claims=None, reward_models=[newer]),
        JobObservation(using, claims=None, unseen=["list rewardmodels"]),
    ):
        assert not any(missing in words for words in explain(look).remedies)


def test_a_remedy_is_told_once() -> None:
    message = "waits for 1 Pod; rollout: image there/is:none cannot be pulled; correct spec.rollout.image, or name a "
    message += "Secret in spec.rollout.template.spec.imagePullSecrets"
    look = JobObservation(
        job(status="False", message=message), [pod("sums-rollout-a", "rollout", "ErrImagePull")], claims=None
    )
    text = " ".join(format_explanation(explain(look), utc_now()).split())
    assert text.count("imagePullSecrets") == 1
    assert "waits for 1 Pod" in text


@pytest.mark.parametrize(
    ("reason", "last"),
    [("InvalidSpec", "kubectl edit rljob sums -n ns"), ("UserError", "kubectl rljob retry sums -n ns")],
)
def test_only_a_failure_that_a_retry_mends_leads_to_retry(reason: str, last: str) -> None:
    assert explain(JobObservation(job("Failed", reason=reason), claims=[])).next[-1] == last


def test_a_retry_without_a_checkpoint_volume_is_told_to_begin_at_step_0() -> None:
    assert "begins at step 0" in explain(JobObservation(job("Failed", reason="HeadFailed"), claims=None)).remedies[0]
    kept = {"persistentVolumeClaim": {"claimName": "models"}}
    kept_job = job("Failed", reason="HeadFailed", checkpoint=kept)
    assert "from its last checkpoint" in explain(JobObservation(kept_job, claims=None)).remedies[0]


def test_a_job_of_another_controller_gets_no_commands_of_ours() -> None:
    found = explain(JobObservation(job(managedBy="kueue.x-k8s.io/multikueue"), claims=None))
    assert "multikueue" in found.why
    assert not found.next


def test_a_changed_spec_that_nobody_looked_at_is_told() -> None:
    manifest = job()
    manifest["metadata"]["generation"] = 2
    assert "has seen generation 1 of this job (its spec is at 2)" in explain(JobObservation(manifest, claims=None)).why


def test_a_job_that_nobody_looked_at_leads_to_the_operators_pods_by_their_own_label() -> None:
    manifest = job()
    manifest["status"] = {}
    found = explain(JobObservation(manifest, claims=None))
    assert "it is behind, or does not run" in found.why
    assert found.next == ["kubectl get pods -A -l app.kubernetes.io/name=rljob-operator"]


def test_a_job_of_a_newer_version_is_explained_as_far_as_its_status_goes() -> None:
    manifest = job(novelty=1)
    manifest["status"] |= {"roles": [{"name": "head", "desired": 1, "ready": 1}], "novelty": 1}
    found = explain(JobObservation(manifest, claims=None))
    assert [role.name for role in found.roles] == ["head"]
    assert "not of this rljob's version" in found.unseen[0]


def test_claims_are_those_of_sources_and_checkpoint() -> None:
    assert name_claims(job(checkpoint={"persistentVolumeClaim": {"claimName": "runs"}})) == ["models", "runs"]


def test_warnings_of_an_earlier_job_and_of_other_jobs_are_left_out() -> None:
    class Cluster:
        def get_job(self, name: str) -> Any:
            return job()

        def list_pods(self, selector: str) -> Any:
            return [pod("sums-head-a", "head", "CrashLoopBackOff")]

        def list_warnings(self) -> Any:
            names = ("sums-head-a", "2026-01-02"), ("sums-head-a", "2025-12-31"), ("tens-head-a", "2026-01-02")
            return [
                {"involvedObject": {"kind": "Pod", "name": n}, "metadata": {}, "lastTimestamp": f"{day}T00:00:00Z"}
                for n, day in names
            ]

        def __getattr__(self, name: str) -> Any:
            return lambda *_: []

    warnings = fetch_observation(Cluster(), "sums").warnings  # type: ignore[arg-type]
    assert [(w["involvedObject"]["name"], w["lastTimestamp"][:10]) for w in warnings] == [("sums-head-a", "2026-01-02")]
