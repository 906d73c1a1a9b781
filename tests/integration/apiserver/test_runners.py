"""A job without rewards, whose episodes a runner runs, with the whole operator on a real API server. The test does what
the controllers and the kubelet do."""

from __future__ import annotations

from tests.integration.apiserver.manifests import MISSING, put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness, start_pod

RUNNER = "agent-runner"
WORKLOADS = (("Job", "head"), ("StatefulSet", "trainer"), ("Deployment", "rollout"), ("Deployment", RUNNER))
PROGRAM = {
    "data.format": "chat",
    "rewards": MISSING,
    "agent": {"type": "program", "runner": {"command": ["python", "agent.py"], "workingDir": "/app"}},
}


async def start_running_job(harness: OperatorHarness) -> None:
    await harness.start()
    await harness.create(put_all(smallest(), PROGRAM))
    await harness.until_all_workloads(len(WORKLOADS))
    for kind, role in WORKLOADS:
        await start_pod(harness, kind, role)
    await harness.until_condition("Running")


async def template_of(harness: OperatorHarness, kind: str, role: str) -> Manifest:
    workload = await harness.get(kind, f"{NAME}-{role}")
    assert workload is not None
    template: Manifest = workload["spec"]["template"]
    return template


async def test_job_without_rewards_runs_when_its_runner_is_ready(harness):
    await harness.start()
    await harness.create(put_all(smallest(), PROGRAM))
    await harness.until_all_workloads(len(WORKLOADS))
    for kind, role in WORKLOADS[:-1]:
        await start_pod(harness, kind, role)

    async def waits_for_the_runner_only() -> bool:
        message: str = (await harness.condition("Running")).get("message", "")
        return f"waits for 1 of 1 {RUNNER} Pod" in message and "1 of 1 head" not in message

    await harness.until("waiting for the runner", waits_for_the_runner_only)
    await start_pod(harness, *WORKLOADS[-1])
    await harness.until_condition("Running")
    status = (await harness.get("RLJob", NAME))["status"]
    assert [role["name"] for role in status["roles"]] == ["head", "trainer", "rollout", RUNNER]
    assert status["rollouts"] == "1/1"
    assert not status.get("rewards"), "the column is empty"


async def test_changed_command_replaces_the_pods_of_the_runner_alone(harness):
    await start_running_job(harness)
    before = {role: await template_of(harness, kind, role) for kind, role in WORKLOADS}
    head = await harness.get("Job", f"{NAME}-head")
    await harness.patch("RLJob", NAME, {"spec": {"agent": {"runner": {"command": ["./agent"]}}}})

    async def has_changed() -> bool:
        config = await harness.get("ConfigMap", f"{NAME}-{RUNNER}")
        changed = before[RUNNER] != await template_of(harness, "Deployment", RUNNER)
        return changed and "./agent" in config["data"]["service.yaml"]

    await harness.until("the new command", has_changed)
    runner = await harness.get("Deployment", f"{NAME}-{RUNNER}")
    assert runner["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 0}
    for kind, role in WORKLOADS[:-1]:
        assert await template_of(harness, kind, role) == before[role], role
    after = await harness.get("Job", f"{NAME}-head")
    assert after["metadata"]["uid"] == head["metadata"]["uid"], "the driver continues; it repeats what is cut off"
