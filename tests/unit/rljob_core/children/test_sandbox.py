"""Sandboxes of agent-sandbox: what a job has, when it has none, and what changes them. The manifests as a whole are in
tests/data/plan/sandbox."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from rljob_api.manifest.job import RLJob
from rljob_core.backend import ChildKey, Manifest, key_of
from rljob_core.children import POD_KINDS, WORKLOAD_KINDS, build_children
from rljob_core.children.common import SANDBOX_POOL, SANDBOX_TEMPLATE
from rljob_core.defaults import DEFAULTS
from tests.support.job_simulation import JobSimulation
from tests.support.job_simulation import make_job as make_any_job

NAME = "gsm8k-agent-code"
TEMPLATE, POOL = ChildKey(SANDBOX_TEMPLATE, NAME), ChildKey(SANDBOX_POOL, NAME)
DATA = {"train": {"source": "/data/train.jsonl"}, "format": "chat"}


def make_agent(**sandbox: Any) -> dict[str, Any]:
    return {"type": "loop", "tools": [{"name": "code", "sandbox": {"provider": "agentSandbox"} | sandbox}]}


def make_job(spec: dict[str, Any] | None = None, **sandbox: Any) -> RLJob:
    job: RLJob = make_any_job(data=DATA, agent=make_agent(**sandbox), **(spec or {}))
    return job


def build(job: RLJob) -> dict[ChildKey, Manifest]:
    return {key_of(child): child for child in build_children(job, "a-token", DEFAULTS)}


def replicas(job: RLJob) -> int:
    number = build(job)[POOL]["spec"]["replicas"]
    assert isinstance(number, int)
    return number


@pytest.mark.parametrize(
    ("prompts", "group_size", "warm", "expected"),
    [(4, 8, None, 32), (64, 8, None, 64), (4, 8, 0, 0), (4, 8, 500, 500)],
)
def test_the_pool_has_a_sandbox_for_each_episode_of_a_step_up_to_64(prompts, group_size, warm, expected):
    sizes = {"schedule": {"promptsPerStep": prompts}, "algorithm": {"groupSize": group_size}}
    assert replicas(make_job(sizes, warmReplicas=warm)) == expected


def test_a_tool_without_replicas_has_no_warm_sandboxes():
    job = make_job()
    job.spec.agent.tools[0].replicas = 0  # as the decision of autoscaling is planned
    assert replicas(job) == 0


def test_the_token_of_the_sandboxes_is_neither_the_jobs_nor_another_tools():
    secret = build(make_job())[ChildKey("Secret", f"{NAME}-sandbox")]["data"]
    settings = json.loads(base64.b64decode(secret["sandbox.json"]))
    assert settings["token"] == base64.b64decode(secret["sandbox-token"]).decode()
    assert "a-token" not in settings["token"]
    assert settings["pool"] == NAME
    assert settings["seconds"] > make_job().spec.agent.episode_seconds


def test_only_the_pods_of_the_tool_have_a_service_account_token():
    children = build(make_job())
    specs = {key: child["spec"]["template"]["spec"] for key, child in children.items() if key.kind in WORKLOAD_KINDS}
    with_token = [key.name for key, spec in specs.items() if spec["automountServiceAccountToken"]]
    assert with_token == [NAME]
    sandbox = children[TEMPLATE]["spec"]["podTemplate"]["spec"]
    assert sandbox["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in sandbox


def test_the_operator_does_not_watch_the_pods_of_sandboxes():
    labels = build(make_job())[TEMPLATE]["spec"]["podTemplate"]["metadata"]["labels"]
    assert "app.kubernetes.io/managed-by" not in labels


def test_a_tool_with_processes_has_no_sandboxes():
    kinds = {key.kind for key in build(make_job(provider="process"))}
    assert not kinds & {SANDBOX_TEMPLATE, SANDBOX_POOL, "ServiceAccount", "Role", "RoleBinding"}


def start(job: RLJob) -> JobSimulation:
    simulation = JobSimulation(job)
    simulation.reconcile()
    assert {TEMPLATE, POOL} <= simulation.children.keys()
    return simulation


def change(simulation: JobSimulation, **spec: Any) -> None:
    given = simulation.job.model_dump(mode="json", by_alias=True)
    given["spec"] |= spec
    given["metadata"]["generation"] += 1
    simulation.job = RLJob.model_validate(given)
    simulation.reconcile()
    simulation.reconcile()


def test_a_suspended_job_has_no_sandboxes_and_gets_them_again():
    simulation = start(make_job())
    change(simulation, suspend=True)
    assert not [key for key in simulation.children if key.kind in POD_KINDS]
    change(simulation, suspend=False)
    assert {TEMPLATE, POOL} <= simulation.children.keys()


def test_everything_of_a_removed_tool_is_deleted():
    simulation = start(make_job())
    change(simulation, agent={"type": "singleTurn"})
    assert not [key for key in simulation.children if key.name.startswith(NAME)]


def test_an_upgrade_replaces_no_sandbox_and_a_change_of_the_image_does():
    simulation = start(make_job())
    old = simulation.children[TEMPLATE]["spec"]
    simulation.defaults = DEFAULTS.model_copy(update={"reward_image": "rljob/reward:0.2.0"})
    simulation.reconcile()
    assert simulation.children[TEMPLATE]["spec"] == old
    assert simulation.writes == 0
    change(simulation, agent=make_agent(image="example.com/swe:1"))
    (container,) = simulation.children[TEMPLATE]["spec"]["podTemplate"]["spec"]["containers"]
    assert container["image"] == "example.com/swe:1"
