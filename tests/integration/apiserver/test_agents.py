"""A job with a simulated user and a tool: its children, Pods, restarts and end, with the whole operator on a real API
server. The test does what the controllers and the kubelet do."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_core.defaults import DEFAULTS
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness, set_status, start_pod

FUNCTION = {"function": {"inline": "def respond(): ..."}}
AGENT = {
    "data.format": "chat",
    "agent": {"type": "loop", "user": FUNCTION, "tools": [{"name": "calculator"} | FUNCTION]},
}
OTHERS = (("Job", "head"), ("StatefulSet", "trainer"), ("Deployment", "rollout"), ("Deployment", "reward-correct"))
AGENTS = ("agent-user", "agent-calculator")
KINDS = ("ConfigMap", "Service", "Deployment", "NetworkPolicy")
NUM_WORKLOADS = len(OTHERS) + len(AGENTS)


async def start_job(harness: OperatorHarness) -> None:
    await harness.start()
    await harness.create(put_all(smallest(), AGENT))
    await harness.until_all_workloads(NUM_WORKLOADS)


async def start_running_job(harness: OperatorHarness) -> None:
    await start_job(harness)
    for kind, role in (*OTHERS, *(("Deployment", role) for role in AGENTS)):
        await start_pod(harness, kind, role)
    await harness.until_condition("Running")


async def role_of(harness: OperatorHarness, name: str) -> Manifest:
    job = await harness.get("RLJob", NAME)
    assert job is not None
    return next(role for role in job["status"]["roles"] if role["name"] == name)


@pytest.mark.parametrize("role", AGENTS)
async def test_each_service_of_an_agent_has_its_children_and_a_deleted_one_is_recreated(harness, role):
    await start_job(harness)
    labels = {"rljob.dev/role": "agent", "rljob.dev/agent": role.removeprefix("agent-")}
    for kind in KINDS:
        child = await harness.get(kind, f"{NAME}-{role}")
        assert child is not None, kind
        assert labels.items() <= child["metadata"]["labels"].items(), kind
        await harness.delete_until_recreated(kind, f"{NAME}-{role}")


async def test_job_runs_when_the_user_and_the_tools_are_ready(harness):
    await start_job(harness)
    for kind, role in OTHERS:
        await start_pod(harness, kind, role)

    async def waits_for_the_agent_only() -> bool:
        message: str = (await harness.condition("Running")).get("message", "")
        roles = [f"1 of 1 {role} Pod" in message for role in ("head", "reward-correct", *AGENTS)]
        return roles == [False, False, True, True]

    await harness.until("waiting for the user and the tool", waits_for_the_agent_only)
    for role in AGENTS:
        await start_pod(harness, "Deployment", role)
    await harness.until_condition("Running")
    job = await harness.get("RLJob", NAME)
    ready = {role["name"]: (role["ready"], role["image"]) for role in job["status"]["roles"]}
    assert [ready[role] for role in AGENTS] == [(1, DEFAULTS.reward_image)] * 2


async def test_crashes_of_the_user_are_charged_to_its_pod(harness):
    await start_running_job(harness)
    name = f"{NAME}-agent-user-0"
    for number in range(1, 8):
        await set_status(harness, name, number)

        async def is_counted(number: int = number) -> bool:
            failures = (await role_of(harness, "agent-user")).get("failures", [])
            return [record["counted"] for record in failures] == [number]

        await harness.until(f"failure {number} in the status", is_counted)
    failed = await harness.until_condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert f"Pod {name} of agent-user failed 7 times" in failed["message"]
    assert "spec.agent.user.backoffLimit is 6" in failed["message"]


async def test_agent_is_scaled_and_changed_while_the_job_runs(harness):
    await start_running_job(harness)
    head = await harness.get("Job", f"{NAME}-head")

    async def has(expected: dict[str, Any]) -> bool:
        user = await harness.get("Deployment", f"{NAME}-agent-user")
        tool = await harness.get("ConfigMap", f"{NAME}-agent-calculator")
        found = {"replicas": user["spec"]["replicas"], "source": tool["data"]["function.py"]}
        return found == expected

    source = "def add(a: int) -> int: ..."
    tools = [{"name": "calculator", "function": {"inline": source}}]
    await harness.patch("RLJob", NAME, {"spec": {"agent": {"user": {"replicas": 3}, "tools": tools}}})
    await harness.until("three users and the new tool", lambda: has({"replicas": 3, "source": source}))
    after = await harness.get("Job", f"{NAME}-head")
    assert after["metadata"]["uid"] == head["metadata"]["uid"], "the driver continues"


async def test_end_of_the_job_deletes_the_agents_workloads(harness):
    await start_running_job(harness)
    now = "2026-01-01T00:00:00Z"
    conditions = [{"type": type_, "status": "True"} for type_ in ("SuccessCriteriaMet", "Complete")]
    status = {"conditions": conditions, "startTime": now, "completionTime": now, "succeeded": 1}
    await harness.patch_status("Job", f"{NAME}-head", status | {"uncountedTerminatedPods": {}})
    await harness.until_condition("Succeeded")

    async def are_terminating() -> bool:
        """Foreground deletion waits for a garbage collector, which does not run here."""
        found = [await harness.get("Deployment", f"{NAME}-{role}") for role in AGENTS]
        return all(workload["metadata"].get("deletionTimestamp") for workload in found)

    await harness.until("the deletion of the user's and the tool's Deployments", are_terminating)


async def test_removed_tool_loses_its_children(harness):
    await start_job(harness)
    await harness.patch("RLJob", NAME, {"spec": {"agent": {"tools": None}}})

    async def is_terminating() -> bool:
        found = await harness.get("Deployment", f"{NAME}-agent-calculator")
        return found is None or bool(found["metadata"].get("deletionTimestamp"))

    await harness.until("the deletion of the tool's Deployment", is_terminating)
    for kind in ("ConfigMap", "Service", "NetworkPolicy"):
        await harness.until_deleted(kind, f"{NAME}-agent-calculator")
    assert await harness.get("ConfigMap", f"{NAME}-agent-user") is not None
