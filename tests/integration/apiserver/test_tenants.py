"""A namespace's RLJobPolicy on a real API server: its defaults, limits and changes."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_core.kube.client import ApiError
from rljob_core.kube.resources import POLICY
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness

DEFAULTS = {
    "trainerImage": "registry.io/trainer:1",
    "nodePools": {"trainer": {"nodeSelector": {"pool": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}},
    "resources": {"trainer": {"requests": {"memory": "4Gi"}}},
}


def build_policy(defaults: Manifest, name: str = "default", **limits: Any) -> Manifest:
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJobPolicy",
        "metadata": {"name": name},
        "spec": {"defaults": defaults, "limits": limits},
    }


async def set_policy(harness: OperatorHarness, defaults: Manifest, **limits: Any) -> None:
    spec = build_policy(defaults, **limits)["spec"]
    await harness.patch("RLJobPolicy", "default", {"spec": spec})


async def read_pods(harness: OperatorHarness) -> dict[str, Manifest]:
    return {w["metadata"]["name"]: w["spec"]["template"]["spec"] for w in await harness.workloads()}


async def test_policy_sets_defaults_and_a_later_one_restarts_nothing(harness):
    await harness.create(build_policy(DEFAULTS))
    await harness.start(resync_seconds=0.4)
    await harness.create(smallest())
    await harness.until_all_workloads()
    pods = await read_pods(harness)
    trainer = pods[f"{NAME}-trainer"]
    assert trainer["containers"][0]["image"] == "registry.io/trainer:1"
    assert trainer["containers"][0]["resources"]["requests"]["memory"] == "4Gi"
    assert trainer["nodeSelector"] == {"pool": "h100"}
    assert {t["key"] for t in trainer["tolerations"]} >= {"gpu"}
    assert "nodeSelector" not in pods[f"{NAME}-rollout"]
    before = {w["metadata"]["name"]: w["metadata"]["resourceVersion"] for w in await harness.workloads()}
    await set_policy(harness, DEFAULTS | {"trainerImage": "registry.io/trainer:2"}, rolloutReplicas=0, gpus=0)
    await harness.wait_for_resyncs()
    assert {w["metadata"]["name"]: w["metadata"]["resourceVersion"] for w in await harness.workloads()} == before
    assert (await harness.condition("Failed")).get("status") != "True"
    await harness.create(smallest(name="later"))
    failed = await harness.until_condition("Failed", name="later")
    assert "spec.rollout.replicas must be at most 0" in failed["message"], "the new limit holds for new jobs"


async def test_job_beyond_a_limit_has_no_children_until_the_limit_is_raised(harness):
    await harness.create(build_policy({}, rolloutReplicas=1))
    await harness.start()
    await harness.create(put_all(smallest(), {"rollout.replicas": 2}))
    failed = await harness.until_condition("Failed")
    assert (failed["reason"], failed["message"]) == (
        "InvalidSpec",
        "spec.rollout.replicas must be at most 1, got 2 "
        f"(spec.limits.rolloutReplicas of RLJobPolicy {harness.namespace}/default); lower it",
    )
    assert await harness.workloads() == []
    assert await harness.list("Secret", "ConfigMap", "Service") == []
    await set_policy(harness, {}, rolloutReplicas=2)
    await harness.until_all_workloads()
    await harness.until_condition("Failed", "False")


async def test_reward_model_beyond_a_limit_says_so(harness):
    await harness.create(build_policy({}, rewardReplicas=1))
    await harness.start()
    await harness.create(put_all(smallest("RewardModel"), {"replicas": 2}))

    async def is_refused() -> bool:
        ready = await harness.condition("Ready", kind="RewardModel")
        return "spec.replicas must be at most 1, got 2" in ready.get("message", "")

    await harness.until("the refusal", is_refused)
    assert await harness.workloads() == []
    await harness.delete("RLJobPolicy", "default")
    await harness.until("the Deployment", harness.workloads)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (build_policy({}, "other"), "metadata.name must be default: a namespace has one RLJobPolicy; rename it"),
        (build_policy({}, gpus=-1), "should be greater than or equal to 0"),
        (build_policy({}, templateFields=["spec"]), "should match"),
        (build_policy({}, nodeLabels={"pool": []}), "should have at least 1 items"),
    ],
)
async def test_wrong_policy_is_refused(harness, policy, message):
    with pytest.raises(ApiError) as refused:
        await harness.api.request("POST", POLICY.path(harness.namespace), body=policy)
    assert message in refused.value.message
