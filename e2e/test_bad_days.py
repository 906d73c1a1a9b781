"""Bad days on a real cluster: what is missing, full or wrong is told in a condition and an Event, `kubectl rljob
explain` says the same, and the job goes on by itself when the cause is mended.

Nothing trains: see bad_days/job.yaml. Each test has a namespace of its own. `make e2e` takes an image, a shared
RewardModel and helm test; `make e2e-faults` all of them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_days.day import MEND_SECONDS, Day
from harness import OPERATOR_NAMESPACE, Cluster, Manifest, execute, wait_for

POOL = {"rljob.dev/pool": "reward"}
BROKEN = "raise RuntimeError('the corpus of the reward is not there')\n"
SOUND = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
TOLERATED = [{"key": "rljob.dev/pool", "operator": "Exists"}]


@pytest.fixture
def day(cluster: Cluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Day]:
    # Where kubectl finds the plugin, kubectl-rljob.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    name = "rljob-bad-" + re.sub(r"[^a-z]+", "-", request.node.name.removeprefix("test_"))[:40].strip("-")
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait")
    cluster.kubectl("create", "namespace", name)
    yield Day(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def assert_explained(day: Day, words: str, command: str, name: str = "job") -> None:
    """explain says it once, in the same words, and what to type next."""
    said = day.explain(name)
    assert said["remedies"].count(words) == 1, said
    assert any(line.startswith(command) for line in said["next"]), said["next"]


def test_an_image_that_is_not_there(day: Day) -> None:
    day.submit(rollout={"image": "registry.invalid/none:1"})
    words = day.wait_for_trouble("ImagePull", ("registry.invalid/none:1", "spec.rollout.image", "imagePullSecrets"))
    assert_explained(day, words, "kubectl edit rljob job")
    day.kubectl("patch", "rljob", "job", "--type=merge", "-p", '{"spec":{"rollout":{"image":"rljob/reward:0.1.0"}}}')
    day.wait_until_well(words)


@pytest.mark.each
def test_a_node_pool_that_no_node_is_in(day: Day) -> None:
    day.submit(rollout={"nodePool": {"nodeSelector": {"rljob.dev/bad-day": "yes"}, "tolerations": TOLERATED}})
    words = day.wait_for_trouble(
        "Unschedulable",
        ("spec.rollout.nodePool", "it asks for nodes with rljob.dev/bad-day=yes", "nodes are available"),
    )
    assert_explained(day, words, "kubectl get nodes --show-labels")
    selector = ",".join(f"{key}={value}" for key, value in POOL.items())
    day.kubectl("label", "node", "-l", selector, "rljob.dev/bad-day=yes")
    try:
        day.wait_until_well(words)
    finally:
        day.kubectl("label", "node", "-l", selector, "rljob.dev/bad-day-")


@pytest.mark.each
def test_a_claim_that_is_not_there_and_then_is_not_bound(day: Day) -> None:
    day.submit(checkpoint={"persistentVolumeClaim": {"claimName": "runs"}})
    field = "spec.checkpoint.persistentVolumeClaim.claimName"
    missing = day.wait_for_trouble("VolumeUnbound", ('persistentvolumeclaim "runs" not found', field))
    assert_explained(day, missing, "kubectl get pvc")
    assert "PersistentVolumeClaim runs does not exist; create it in the job's namespace" in day.explain()["remedies"]
    claim, volume = build_claim(day.namespace)
    day.apply(claim)
    unbound = day.wait_for_trouble("VolumeUnbound", ("unbound", "runs", field))
    assert_explained(day, unbound, "kubectl describe pvc runs")
    day.apply(volume)
    try:
        day.wait_until_well(unbound)
    finally:
        day.kubectl("delete", "pv", volume["metadata"]["name"], "--wait=false")


def build_claim(namespace: str) -> tuple[Manifest, Manifest]:
    """A claim, and the volume that it waits for."""
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "runs"},
        "spec": common | {"volumeName": namespace, "resources": {"requests": {"storage": "1Gi"}}},
    }
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace},
        "spec": common
        | {
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"/tmp/{namespace}", "type": "DirectoryOrCreate"},
        },
    }
    return claim, volume


@pytest.mark.each
def test_a_quota_that_is_full(day: Day) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team"},
        "spec": {"hard": {"requests.memory": "512Mi"}},
    }
    day.apply(quota)
    day.submit()  # the quota counts requests, and no Pod names any
    unnamed = day.wait_for_trouble(
        "QuotaUnspecified", ("quota team asks for requests.memory", "spec.rollout.resources")
    )
    assert_explained(day, unnamed, "kubectl edit rljob job")
    small = {"resources": {"requests": {"memory": "32Mi"}}}
    day.submit(head=small, trainer=small, rollout={"resources": {"requests": {"memory": "1Gi"}}}, rewards=with_memory())
    full = day.wait_for_trouble(
        "QuotaExceeded", ("quota team has no room for requests.memory=1Gi", "ResourceQuota", "spec.rollout.resources")
    )
    assert_explained(day, full, "kubectl describe resourcequota")
    quota["spec"] = {"hard": {"requests.memory": "4Gi"}}
    day.apply(quota)
    day.wait_until_well(full)


def with_memory() -> list[Manifest]:
    return [build_reward(function={"inline": SOUND}) | {"resources": {"requests": {"memory": "64Mi"}}}]


def build_reward(**kind: Manifest) -> Manifest:
    served = {"slots": 1, "nodePool": {"nodeSelector": POOL, "tolerations": TOLERATED}}
    return {"name": "any"} | kind | (served if "function" in kind else {})


def build_source(text: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scoring"}, "data": {"score.py": text}}


FROM_SOURCE = {"configMapKeyRef": {"name": "scoring", "key": "score.py"}}


@pytest.mark.each
def test_a_reward_function_that_raises_on_import(day: Day) -> None:
    """The job ends and gives its nodes back. A changed spec starts it again, a changed ConfigMap and a retry do too."""
    told = ("reward-any", "the corpus of the reward is not there", "mend spec.rewards[0].function")
    day.submit(rewards=[build_reward(function={"inline": BROKEN})])
    assert_failed(day, day.wait_for_trouble("UserError", told, condition="Failed"))
    day.apply(build_source(SOUND))
    day.submit(rewards=[build_reward(function=FROM_SOURCE)])
    day.wait_until_well()
    day.apply(build_source(BROKEN))
    day.kubectl("delete", "pod", "-l", "rljob.dev/role=reward")  # the next one reads what the ConfigMap says by then
    assert_failed(day, day.wait_for_trouble("UserError", told, condition="Failed"))
    day.apply(build_source(SOUND))
    day.rljob("retry", "job")
    day.wait_until_well()


def assert_failed(day: Day, words: str) -> None:
    said = day.explain()
    assert words in said["why"]
    assert said["next"][-1] == f"kubectl rljob retry job -n {day.namespace}"
    wait_for("nodes that are given back", lambda: not day.pods(), MEND_SECONDS)


def build_model(**spec: object) -> Manifest:
    pool = {"nodeSelector": POOL, "tolerations": TOLERATED}
    fields = {"slots": 1, "nodePool": pool, "function": {"inline": SOUND}} | spec
    kind = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RewardModel"}
    return kind | {"metadata": {"name": "style"}, "spec": fields}


def test_a_reward_model_in_use_is_shared_scaled_deleted_and_made_again(day: Day) -> None:
    day.apply(build_model())
    for name in ("one", "two"):
        day.submit(name, rewards=[build_reward(rewardModelRef={"name": "style"})])
    for name in ("one", "two"):
        day.wait_until_well(name=name)
    assert re.search(r"NAME +READY +REPLICAS +P95 +AGE\nstyle +True +1 ", day.kubectl("get", "rewardmodel"))
    day.kubectl("scale", "rewardmodel", "style", "--replicas=2")
    wait_for("two Pods", lambda: day.get("rewardmodel", "style")["status"].get("readyReplicas") == 2, MEND_SECONDS)
    day.kubectl("delete", "rewardmodel", "style")
    for name in ("one", "two"):
        told = ("RewardModel style does not exist; create it", "spec.rewards[0].rewardModelRef")
        words = day.wait_for_trouble("RewardModelMissing", told, name=name)
        assert_explained(day, words, "kubectl get rewardmodels", name)
    day.apply(build_model())
    for name in ("one", "two"):
        day.wait_until_well(words, name)


@pytest.mark.each
def test_a_reward_models_function_that_raises_on_import(day: Day) -> None:
    day.apply(build_source(BROKEN), build_model(function=FROM_SOURCE))
    day.submit(rewards=[build_reward(rewardModelRef={"name": "style"})])
    told = ("the corpus of the reward is not there", "spec.function")
    day.wait_for_trouble("FunctionFailed", told, name="style", condition="Ready", kind="RewardModel")
    words = day.wait_for_trouble("RewardModelNotReady", ("RewardModel style is not ready (FunctionFailed)",))
    assert_explained(day, words, "kubectl describe rewardmodels")
    day.apply(build_source(SOUND))
    day.wait_until_well(words)
    assert day.condition("Ready", "style", "rewardmodel")["status"] == "True"


def test_the_charts_own_test_passes(cluster: Cluster) -> None:
    said = execute(*cluster.helm_command, "test", "rljob", "-n", OPERATOR_NAMESPACE, "--timeout", "5m").decode()
    assert re.search(r"Phase: +Succeeded", said), "a chart whose tests are left out has none that fails"
