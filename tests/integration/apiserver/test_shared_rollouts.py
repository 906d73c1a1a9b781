"""A job whose rollouts run in the trainer's Pods, with the whole operator on a real API server. The test does what the
controllers and the kubelet do."""

from __future__ import annotations

import pytest

from rljob_core.children import WORKLOAD_KINDS
from rljob_core.kube.client import ApiError
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, OperatorHarness, start_pod

SHARED = {"rollout.placement": "trainer"}
WORKLOADS = (("Job", "head"), ("StatefulSet", "trainer"), ("Deployment", "reward-correct"))
CHILDREN = {
    "ConfigMap": {"config", "reward-correct"},
    "Deployment": {"reward-correct"},
    "Job": {"head"},
    "NetworkPolicy": {"head", "reward-correct"},
    "PodDisruptionBudget": {"head"},
    "Secret": {"token"},
    "Service": {"head", "trainer", "reward-correct"},
    "StatefulSet": {"trainer"},
}


OF_ROLLOUTS = {"NetworkPolicy", "Service"}
"""Children, besides the workload, of rollouts with Pods of their own."""


async def start_job(harness: OperatorHarness) -> None:
    await harness.start()
    await harness.create(put_all(smallest(), SHARED))
    await harness.until_all_workloads(len(WORKLOADS))


async def names_of(harness: OperatorHarness) -> dict[str, set[str]]:
    """Return the children by kind, without the name of the job."""
    found: dict[str, set[str]] = {kind: set() for kind in CHILDREN}
    for child in await harness.list(*CHILDREN):
        found[child["kind"]].add(child["metadata"]["name"].removeprefix(f"{NAME}-"))
    return found


async def test_job_has_no_child_of_rollouts_and_runs_without_them(harness):
    await start_job(harness)
    assert await names_of(harness) == CHILDREN
    for kind, role in WORKLOADS:
        await start_pod(harness, kind, role)
    await harness.until_condition("Running")
    status = (await harness.get("RLJob", NAME))["status"]
    assert [role["name"] for role in status["roles"]] == ["head", "trainer", "reward-correct"]
    assert not status.get("rollouts"), "the column is empty"


async def test_placement_changes_only_while_the_job_is_suspended(harness):
    await start_job(harness)
    with pytest.raises(ApiError, match=r"rollout.placement is immutable while the job runs; set suspend: true first"):
        await harness.patch("RLJob", NAME, {"spec": {"rollout": {"placement": "separate"}}})
    await harness.patch("RLJob", NAME, {"spec": {"suspend": True}})
    await harness.until_condition("Suspended")
    kept = {kind: names for kind, names in CHILDREN.items() if kind not in WORKLOAD_KINDS}
    await harness.patch("RLJob", NAME, {"spec": {"rollout": {"placement": "separate"}}})

    async def are_as_expected() -> bool:
        found = await names_of(harness)
        return {kind: found[kind] for kind in kept} == kept | {"Service": kept["Service"] - {"trainer"}}

    await harness.until("no Service of engines in the trainers", are_as_expected)
    await harness.patch("RLJob", NAME, {"spec": {"suspend": False}})
    with_rollouts = {kind: names | {"rollout"} for kind, names in kept.items() if kind in OF_ROLLOUTS}

    async def has_rollouts() -> bool:
        found = await names_of(harness)
        return all(names - {"trainer"} <= found[kind] for kind, names in with_rollouts.items())

    await harness.until("the children of separate rollouts", has_rollouts)


async def test_scale_of_rollouts_that_follow_from_the_trainer_is_refused(harness):
    await start_job(harness)
    with pytest.raises(ApiError, match=r"rollout.replicas must be 1 \(its default\) with rollout.placement trainer"):
        await harness.patch("RLJob", NAME, {"spec": {"rollout": {"replicas": 3}}})
