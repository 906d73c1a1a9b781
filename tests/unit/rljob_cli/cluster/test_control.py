from datetime import UTC, datetime
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.contract import ANNOTATION_RETRY
from rljob_cli.cluster.control import plan_change, plan_restart

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def job(phase: str = "Running", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "ns", "name": "sums"}, "spec": spec, "status": {"phase": phase}}


def test_suspend_and_resume_patch_only_their_field() -> None:
    assert plan_change("suspend", job(), NOW).patch == {"spec": {"suspend": True}}
    assert plan_change("resume", job("Suspended", suspend=True), NOW).patch == {"spec": {"suspend": False}}


def test_job_already_in_the_requested_state_is_not_patched() -> None:
    assert plan_change("suspend", job("Suspended", suspend=True), NOW).patch is None
    assert plan_change("resume", job(), NOW).patch is None


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_finished_job_is_neither_suspended_nor_resumed(verb: str, phase: str) -> None:
    with pytest.raises(UserError, match=phase.lower()):
        plan_change(verb, job(phase), NOW)


def test_job_of_another_controller_is_not_patched() -> None:
    foreign = job("Failed", managedBy="kueue.x-k8s.io/multikueue")
    for verb in ("suspend", "resume", "retry"):
        with pytest.raises(UserError, match="multikueue"):
            plan_change(verb, foreign, NOW)


def test_only_a_failed_job_is_retried() -> None:
    assert plan_change("retry", job("Failed"), NOW).patch == {
        "metadata": {"annotations": {ANNOTATION_RETRY: NOW.isoformat()}}
    }
    with pytest.raises(UserError, match="this one is Running"):
        plan_change("retry", job("Running"), NOW)


REWARDS = [
    {"name": "correct", "function": {"inline": "x"}},
    {"name": "style", "judge": {}},
    {"name": "remote", "http": {"url": "http://x"}},
    {"name": "shared", "rewardModelRef": {"name": "y"}},
]
CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}


def training_job(step: int = 7, **spec: Any) -> dict[str, Any]:
    return job(rewards=REWARDS, **spec) | {"status": {"phase": "Running", "progress": {"step": step}}}


@pytest.mark.parametrize(
    ("roles", "names"),
    [
        ([], ["restart"]),
        (["rollout"], ["restart-rollout"]),
        (["head", "reward-style"], ["restart-head", "restart-reward-style"]),
        (["reward"], ["restart-reward-correct", "restart-reward-style"]),
    ],
)
def test_restart_annotates_the_job_for_its_roles(roles: list[str], names: list[str]) -> None:
    change = plan_restart(training_job(checkpoint=CLAIM), roles, NOW)
    assert change.patch == {"metadata": {"annotations": {f"rljob.dev/{name}": NOW.isoformat() for name in names}}}
    resumes = "training resumes from its last checkpoint" in change.message
    assert resumes == (not roles or "head" in roles)


def test_restart_of_a_runner_which_an_environment_has_in_any_case() -> None:
    agent = {"type": "environment", "environment": {"framework": "trl", "id": "a:B"}}
    change = plan_restart(training_job(agent=agent), ["agent"], NOW)
    assert change.patch == {"metadata": {"annotations": {"rljob.dev/restart-agent-runner": NOW.isoformat()}}}


@pytest.mark.parametrize(
    ("roles", "names"),
    [
        (["agent-user"], ["restart-agent-user"]),
        (["agent"], ["restart-agent-user", "restart-agent-search"]),
    ],
)
def test_restart_of_an_agents_pods_needs_no_checkpoint(roles: list[str], names: list[str]) -> None:
    agent = {"type": "loop", "user": {"function": {}}, "tools": [{"name": "search", "function": {}}]}
    change = plan_restart(training_job(agent=agent), roles, NOW)
    assert change.patch == {"metadata": {"annotations": {f"rljob.dev/{name}": NOW.isoformat() for name in names}}}
    with pytest.raises(UserError, match="reward-style, agent-user, agent-search"):
        plan_restart(training_job(agent=agent), ["agent-other"], NOW)


@pytest.mark.parametrize("roles", [[], ["trainer"], ["rollout", "head"]])
def test_restart_loses_no_progress_without_force(roles: list[str]) -> None:
    with pytest.raises(UserError, match="loses its 7 steps; pass --force"):
        plan_restart(training_job(), roles, NOW)
    assert plan_restart(training_job(), roles, NOW, force=True).message.endswith("training starts again at step 0")
    assert plan_restart(training_job(step=0), roles, NOW).patch


def test_suspension_loses_no_progress_without_force() -> None:
    with pytest.raises(UserError, match=r"spec.checkpoint.persistentVolumeClaim or storage: a suspension loses its 7"):
        plan_change("suspend", training_job(), NOW)
    assert plan_change("suspend", training_job(), NOW, force=True).patch == {"spec": {"suspend": True}}
    assert plan_change("suspend", training_job(step=0), NOW).patch
    assert "its checkpoints stay" in plan_change("suspend", training_job(checkpoint=CLAIM), NOW).message
    stored = training_job(checkpoint={"storage": "s3://bucket/runs"})
    assert "its checkpoints stay" in plan_change("suspend", stored, NOW).message
    resumed = training_job(suspend=True) | {"status": {"phase": "Suspended", "progress": {"step": 7}}}
    assert "starts from step 0" in plan_change("resume", resumed, NOW).message


def test_restart_of_other_roles_needs_no_checkpoint() -> None:
    assert plan_restart(training_job(), ["rollout", "reward-correct"], NOW).patch


def test_rollouts_in_the_trainers_pods_are_restarted_with_these() -> None:
    shared = training_job(checkpoint=CLAIM, rollout={"placement": "trainer"})
    with pytest.raises(UserError, match=r"in the trainer's Pods \(spec.rollout.placement: trainer\).* --role trainer"):
        plan_restart(shared, ["rollout"], NOW)
    with pytest.raises(UserError, match="its roles are head, trainer, reward-correct, reward-style"):
        plan_restart(shared, ["other"], NOW)
    assert plan_restart(shared, ["trainer"], NOW).patch


@pytest.mark.parametrize("role", ["reward-remote", "reward-shared", "rollouts", ""])
def test_restart_names_the_roles_that_have_pods(role: str) -> None:
    with pytest.raises(UserError, match="its roles are head, trainer, rollout, reward-correct, reward-style"):
        plan_restart(training_job(), [role], NOW)


@pytest.mark.parametrize(
    ("phase", "remedy"),
    [("Succeeded", "another name"), ("Failed", "rljob resume --retry"), ("Suspended", "rljob resume")],
)
def test_job_without_pods_is_not_restarted(phase: str, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        plan_restart(job(phase), [], NOW)


def test_job_of_another_controller_is_not_restarted() -> None:
    with pytest.raises(UserError, match="multikueue"):
        plan_restart(job(managedBy="kueue.x-k8s.io/multikueue"), [], NOW)
