"""A job that starts from the model of another job (job://NAME@STEP), on a real API server."""

from __future__ import annotations

from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness

START = {"model.source": "job://sums@last"}


async def until_waiting(harness: OperatorHarness, reason: str) -> str:
    async def waits() -> Manifest | None:
        running = await harness.condition("Running")
        return running if running.get("reason") == reason else None

    return (await harness.until(reason, waits))["message"]


async def read_claims(harness: OperatorHarness) -> dict[str, list[Manifest]]:
    """Return the claims of each workload of the job that starts."""
    workloads = [w for w in await harness.workloads() if w["metadata"]["name"].startswith(NAME)]
    volumes = {w["metadata"]["name"]: w["spec"]["template"]["spec"]["volumes"] for w in workloads}
    return {name: [v["persistentVolumeClaim"] for v in found if v.get("persistentVolumeClaim")]
            for name, found in volumes.items()}  # fmt: skip


async def test_job_waits_for_the_model_of_another_and_outlives_it(harness):
    await harness.start(resync_seconds=0.4)
    await harness.create_claim("runs")
    await harness.create(put_all(smallest(), START))
    assert "needs RLJob sums, which does not exist" in await until_waiting(harness, "StartModelMissing")
    await harness.create(smallest(name="sums"))

    async def names_claim() -> bool:
        return "set spec.checkpoint.persistentVolumeClaim in sums" in await until_waiting(harness, "StartModelMissing")

    await harness.until("the field of the claim", names_claim)
    await harness.patch("RLJob", "sums", {"spec": {"checkpoint": {"persistentVolumeClaim": {"claimName": "runs"}}}})
    assert "exports its model at its end" in await until_waiting(harness, "StartModelNotExported")
    assert await read_claims(harness) == {}, "no Pod holds a node meanwhile"
    head = await harness.until("the head of sums", lambda: harness.get("Job", "sums-head"))
    now = head["metadata"]["creationTimestamp"]
    conditions = [{"type": type_, "status": "True"} for type_ in ("SuccessCriteriaMet", "Complete")]
    status = {"conditions": conditions, "startTime": now, "completionTime": now, "succeeded": 1}
    await harness.patch_status("Job", "sums-head", status)
    await harness.until("the head", lambda: harness.get("Job", f"{NAME}-head"))

    async def has_all() -> bool:
        return len(await read_claims(harness)) == 4

    await harness.until("all workloads", has_all)
    mounted = [{"claimName": "runs", "readOnly": True}]
    expected = {f"{NAME}-{role}": mounted for role in ("head", "trainer", "rollout")} | {f"{NAME}-reward-correct": []}
    assert await read_claims(harness) == expected

    async def is_named() -> bool:
        status = (await harness.get("RLJob", NAME) or {}).get("status") or {}
        return bool(status.get("startModel") == {"job": "sums", "claim": "runs"})

    await harness.until("the status, which follows the workloads", is_named)

    await harness.delete("RLJob", "sums")
    await harness.until_deleted("RLJob", "sums")
    await harness.delete_until_recreated("Job", f"{NAME}-head")
    await harness.wait_for_resyncs()
    assert await read_claims(harness) == expected, "also those of a new head"
    assert (await harness.condition("Failed"))["status"] == "False"
