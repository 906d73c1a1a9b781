"""Which restarts are charged, with the whole operator on a real API server. The test does what the controllers and the
kubelet do."""

from __future__ import annotations

from datetime import UTC, datetime

from rljob_core.children.common import DISRUPTION_CONDITIONS
from tests.integration.apiserver.manifests import smallest
from tests.integration.apiserver.operator_harness import (
    NAME,
    READY,
    Manifest,
    OperatorHarness,
    set_status,
    start_pod,
)

WORKLOADS = (("Job", "head"), ("StatefulSet", "trainer"), ("Deployment", "rollout"), ("Deployment", "reward-correct"))


async def start_running_job(harness: OperatorHarness) -> None:
    await harness.start()
    await harness.create(smallest())
    await harness.until_all_workloads()
    for kind, role in WORKLOADS:
        await start_pod(harness, kind, role)
    await harness.until_condition("Running")


async def evict(harness: OperatorHarness, name: str) -> Manifest:
    """Evict through the Eviction API, as a drain does. Return the Pod as the API server leaves it to its kubelet."""
    for budget in await harness.list("PodDisruptionBudget"):
        generation, count = (
            budget["metadata"]["generation"],
            {"currentHealthy": 1, "desiredHealthy": 0, "expectedPods": 1},
        )
        status = {"observedGeneration": generation, "disruptionsAllowed": 1, "disruptedPods": None, **count}
        await harness.patch_status("PodDisruptionBudget", budget["metadata"]["name"], status)
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    await harness.api.request("POST", f"{harness.path('Pod', name)}/eviction", body=body)
    pod = await harness.get("Pod", name)
    assert pod is not None
    return pod


async def restarts_of(harness: OperatorHarness, role: str) -> Manifest:
    job = await harness.get("RLJob", NAME)
    assert job is not None
    return next(r for r in job["status"]["roles"] if r["name"] == role)


async def test_seven_drains_of_a_trainer_are_not_charged(harness):
    await start_running_job(harness)
    name = f"{NAME}-trainer-0"
    for _ in range(7):
        pod = await evict(harness, name)
        (condition,) = [c for c in pod["status"]["conditions"] if c["type"] == "DisruptionTarget"]
        assert (condition["reason"], bool(pod["metadata"].get("deletionTimestamp"))) == ("EvictionByEvictionAPI", True)
        await set_status(harness, name, 1, [*READY, condition])  # its containers are killed
        await harness.until_condition("Restarting")
        await harness.delete("Pod", name, gracePeriodSeconds=0)  # the kubelet confirms the end
        assert await start_pod(harness, "StatefulSet", "trainer") == name
        await harness.until_condition("Running")
    assert (await harness.condition("Failed"))["status"] == "False"
    assert (await restarts_of(harness, "trainer")).get("failures", []) == []
    assert await harness.events("RoleRestarted") == []


async def test_seven_crashes_of_a_trainer_fail_the_job(harness):
    await start_running_job(harness)
    name = f"{NAME}-trainer-0"
    for number in range(1, 8):
        assert (await harness.condition("Failed"))["status"] == "False"
        await set_status(harness, name, number)

        async def is_counted(number: int = number) -> bool:
            failures = (await restarts_of(harness, "trainer")).get("failures", [])
            return [record["counted"] for record in failures] == [number]

        await harness.until(f"failure {number} in the status", is_counted)
    failed = await harness.until_condition("Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert failed["message"] == (
        "the trainers failed 7 times within 21600 s, and spec.trainer.backoffLimit is 6; "
        f"last: exit code 137: OOMKilled (see the log of Pod {name})"
    )

    async def are_recorded() -> bool:
        """Events follow the status. The seventh failure ends the job, and Failed names it."""
        events = await harness.events("RoleRestarted")
        message = f"trainer restarted: exit code 137: OOMKilled; counts against backoffLimit (Pods: {name})"
        assert {event["message"] for event in events} <= {message}
        return sum(event["count"] for event in events) == 6

    await harness.until("six events", are_recorded)


async def test_head_that_keeps_failing_leaves_a_suspended_job(harness):
    """Its failed Pods, which it owns, keep their logs."""
    await start_running_job(harness)
    for number in range(7):
        name = f"{NAME}-head-0"
        now = datetime.now(UTC)
        end = {"exitCode": 75, "reason": "Error", "finishedAt": now.strftime("%Y-%m-%dT%H:%M:%SZ")}
        status = {"name": "head", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        status["state"] = {"terminated": end | {"message": "error: lost Ray"}}
        await harness.patch_status("Pod", name, {"phase": "Failed", "containerStatuses": [status]})

        async def is_counted(number: int = number) -> bool:
            failures = (await restarts_of(harness, "head")).get("failures", [])
            return [record["counted"] for record in failures] == [number + 1]

        await harness.until(f"failure {number + 1} of the head", is_counted)
        if number < 6:
            await harness.delete("Pod", name, gracePeriodSeconds=0)

            async def is_later(now: datetime = now) -> bool:
                """The next Pod of a Job is created 10 s later. Creation times are in whole seconds."""
                return datetime.now(UTC).replace(microsecond=0) > now

            await harness.until("another second", is_later)
            await start_pod(harness, "Job", "head")
    failed = await harness.until_condition("Failed")
    assert (failed["reason"], "the head failed 7 times" in failed["message"]) == ("HeadFailed", True)
    assert "last: exit code 75: lost Ray" in failed["message"]

    async def is_suspended() -> bool:
        alive = [w for w in await harness.workloads() if "deletionTimestamp" not in w["metadata"]]
        kinds = {workload["kind"]: workload for workload in alive}
        return kinds.keys() == {"Job"} and kinds["Job"]["spec"].get("suspend") is True

    await harness.until("the end of all other workloads", is_suspended)


async def test_head_of_an_earlier_operator_gets_the_new_limit_and_keeps_its_policy(harness):
    """podFailurePolicy is immutable, backoffLimit is not."""
    await harness.start()
    await harness.create(smallest())
    await harness.until_all_workloads()
    job = await harness.get("Job", f"{NAME}-head")
    types = [rule["onPodConditions"][0]["type"] for rule in job["spec"]["podFailurePolicy"]["rules"][1:]]
    assert types == list(DISRUPTION_CONDITIONS)
    await harness.patch("Job", f"{NAME}-head", {"spec": {"backoffLimit": 6}})

    async def has_limit() -> bool:
        found = await harness.get("Job", f"{NAME}-head")
        return bool(found and found["spec"]["backoffLimit"] == 2**31 - 1)

    await harness.until("the limit of this operator", has_limit)
    assert (await harness.get("Job", f"{NAME}-head"))["metadata"]["uid"] == job["metadata"]["uid"], "the head runs on"
