"""The objects of an episode with given answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rljob_api.errors import UserError
from rljob_cli.agents import command as given_answers
from rljob_cli.agents.command import build_rehearsal, describe_rest, find_playable
from rljob_cli.check.jobfile import load
from rljob_cli.main import app
from rljob_cli.manifests import role_of
from tests.paths import EXAMPLES

FEEDBACK = EXAMPLES / "feedback" / "rljob.yaml"


def test_rehearsal_has_the_services_and_the_head_with_another_program():
    job = load(FEEDBACK).job
    children = build_rehearsal(job, find_playable(job))
    workloads = {role_of(child): child for child in children if child["kind"] in ("Deployment", "StatefulSet", "Job")}
    assert sorted(workloads) == ["agent-user", "head", "reward-correct"]
    [container] = workloads["head"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "rljob_trainer.rehearsal", "/var/lib/rljob/rehearsal.json"]
    assert {child["spec"]["replicas"] for role, child in workloads.items() if role != "head"} == {1}
    assert {role_of(child) for child in children} == {"", *workloads}


def test_rehearsal_of_a_program_has_its_runner(tmp_path):
    CliRunner().invoke(app, ["init", str(tmp_path / "mine"), "--agent", "program"])
    job = load(tmp_path / "mine" / "rljob.yaml").job
    children = build_rehearsal(job, find_playable(job))
    assert sorted(filter(None, {role_of(child) for child in children})) == ["agent-runner", "head"]


def test_rewards_that_need_a_model_are_left_out():
    job = load(EXAMPLES / "judge" / "rljob.yaml").job
    served = [reward.name for reward in job.spec.rewards if reward.judge]
    playable = find_playable(job)
    assert served
    assert not set(served) & set(playable)
    roles = {role_of(child) for child in build_rehearsal(job, playable)}
    assert roles == {"", "head", *(f"reward-{name}" for name in playable)}
    [line] = describe_rest([], job, ["4"])
    assert line == f"not scored by {', '.join(served)}, which needs a model"


@pytest.mark.parametrize(("role", "message"), [("head", "error"), ("agent-user", "end")])
async def test_container_that_ends_early_is_explained_by_its_role(monkeypatch, role, message):
    """The head's log ends with its own error; another container has an exit code, and its log."""
    monkeypatch.setattr(given_answers, "role_of", lambda pod: role)
    monkeypatch.setattr(given_answers, "phase_of", lambda pod: "Failed")
    monkeypatch.setattr(given_answers, "find_ended_container", lambda pod: "container")
    monkeypatch.setattr(given_answers, "describe_error", lambda pod, ended: "error")
    monkeypatch.setattr(given_answers, "describe_end", lambda pod, ended: "end")
    cluster = SimpleNamespace(check=lambda: None, store=SimpleNamespace(pods={"pod": {}}))
    with pytest.raises(UserError, match=f"^{message}$"):
        await given_answers._wait_until_played(cluster)
