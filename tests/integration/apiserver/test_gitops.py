"""What Flux and kpt take a job and a RewardModel for, by kstatus' rules and what a real API server has stored."""

from __future__ import annotations

from tests.integration.apiserver.manifests import smallest
from tests.integration.apiserver.operator_harness import NAME, OperatorHarness, make_ready, set_status
from tests.support.kstatus import compute_status


async def until_status(harness: OperatorHarness, expected: str, why: str, kind: str = "RLJob") -> None:
    async def is_reported() -> bool:
        found = await harness.get(kind, NAME)
        assert found is not None
        is_observed = found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]
        return is_observed and compute_status(found) == expected

    await harness.until(f"{expected}: {why}", is_reported)


async def test_job_is_what_other_tools_expect_in_its_whole_life(harness: OperatorHarness) -> None:
    await harness.start()
    created = await harness.create(smallest())
    assert compute_status(created) == "Current", "kstatus knows nothing of an object without a status"
    await until_status(harness, "InProgress", "its Pods start")
    await harness.until_all_workloads()
    await make_ready(harness)
    await until_status(harness, "Current", "it runs")
    await harness.patch("RLJob", NAME, {"spec": {"rollout": {"template": {"spec": {"nodeSelectr": {}}}}}})
    await until_status(harness, "Failed", "its change is refused")
    await harness.patch("RLJob", NAME, {"spec": {"rollout": {"template": None}}})
    await until_status(harness, "Current", "it runs again")
    await set_status(harness, f"{NAME}-rollout-0", 1, [{"type": "Ready", "status": "False"}])
    await until_status(harness, "InProgress", "a Pod restarts")
    await harness.patch("RLJob", NAME, {"spec": {"suspend": True}})
    await until_status(harness, "Current", "it is suspended, as it should be")
    found = await harness.get("RLJob", NAME)
    assert found is not None
    assert {"Ready", "Reconciling", "Stalled"}.isdisjoint(each["type"] for each in found["status"]["conditions"])


async def test_reward_model_waits_and_fails(harness: OperatorHarness) -> None:
    await harness.start()
    await harness.create(smallest("RewardModel"))
    await until_status(harness, "InProgress", "its Pods start", "RewardModel")
    await harness.patch("RewardModel", NAME, {"spec": {"template": {"spec": {"nodeSelectr": {}}}}})
    await until_status(harness, "Failed", "its template is wrong", "RewardModel")
