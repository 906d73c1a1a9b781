"""Drained and lost nodes on a real cluster: the job continues, and what the cluster did is charged to no role."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import NAMESPACE, Cluster, Job, Manifest, log_step, python

NUM_DRAINS = 7
"""One more than the default of backoffLimit."""


@pytest.mark.each
def test_drains_of_trainers_are_not_charged(submit: Callable[..., Job]) -> None:
    job = submit("drains", schedule={"steps": 60, "promptsPerStep": 4}, checkpoint={"everySteps": 1})
    job.wait_for_step(1)
    for number in range(1, NUM_DRAINS + 1):
        log_step(f"{job.name}: drain {number}")
        drain_trainers(job)
        job.wait_for_step(job.step() + 1)
    assert job.condition("Failed")["status"] == "False"
    job.wait_for_success()


def drain_trainers(job: Job) -> None:
    """Evict the trainers as a drain does, and wait until others have replaced them."""
    pods = job.wait_for("two trainer Pods", lambda: ready_pods(job, 2))
    node, uids = pods[0]["spec"]["nodeName"], {pod["metadata"]["uid"] for pod in pods}
    selector = f"--pod-selector=rljob.dev/job={job.name},rljob.dev/role=trainer"
    try:
        job.cluster.kubectl("drain", node, selector, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s")
    finally:
        job.cluster.kubectl("uncordon", node)

    def are_replaced() -> bool:
        return not uids & {pod["metadata"]["uid"] for pod in ready_pods(job, 2)} and bool(ready_pods(job, 2))

    job.wait_for("new trainer Pods", are_replaced)


def ready_pods(job: Job, number: int) -> list[Manifest]:
    """The trainer Pods if so many are ready, else none."""
    pods = [
        pod
        for pod in job.cluster.pods(job.name, "trainer")
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
    ]
    return pods if len(pods) == number else []


@pytest.mark.each
def test_lost_node_is_named_and_its_pods_are_replaced_by_choice(cluster: Cluster, submit: Callable[..., Job]) -> None:
    """The node of the trainer pool loses its power for good. One trainer runs there, the rest of the job elsewhere."""
    if not cluster.is_local:
        pytest.skip("only a cluster of this machine has nodes that can be switched off")
    job = submit(
        "lost-node",
        scheduling={"forceDeleteAfterSeconds": 15},
        schedule={"steps": 30, "promptsPerStep": 4},
        checkpoint={"everySteps": 1},
        head=on_pools("rollout"),
        trainer=on_pools("trainer", "rollout", spread="trainer"),
    )
    job.wait_for_step(2)
    lost = next(pod for pod in cluster.pods(job.name, "trainer") if pod["spec"]["nodeName"] == "rljob-trainer")
    log_step(f"{job.name}: power failure of the node of {lost['metadata']['name']} at step {job.step()}")
    python("-m", "rljob_cluster", "power-off", "trainer")
    try:
        message = job.wait_for("the cause NodeLost", lambda: find_message(job, "NodeLost"))
        log_step(message)
        assert lost["metadata"]["name"] in message
        assert "rljob-trainer" in message
        step = job.step()
        job.wait_for_step(step + 2)
        nodes = {pod["spec"]["nodeName"] for pod in cluster.pods(job.name, "trainer")}
        assert nodes == {"rljob-rollout"}, "the lost Pod was replaced on another node"
        job.wait_for_success()
    finally:
        python("-m", "rljob_cluster", "power-on", "trainer")
        cluster.kubectl("wait", "node/rljob-trainer", "--for=condition=Ready", "--timeout=120s")


def on_pools(*pools: str, spread: str = "") -> Manifest:
    """The fields of a role that may run on the nodes of these pools, if possible one Pod on each."""
    terms = [{"matchExpressions": [{"key": "rljob.dev/pool", "operator": "In", "values": list(pools)}]}]
    soon = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for key in ("not-ready", "unreachable")
    ]
    affinity: Manifest = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    if spread:
        term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"rljob.dev/role": spread}}}
        affinity["podAntiAffinity"] = {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
        }
    tolerations = [{"key": "rljob.dev/pool", "operator": "Exists"}, *soon]
    return {"nodePool": {}, "template": {"spec": {"affinity": affinity, "tolerations": tolerations}}}


def find_message(job: Job, reason: str) -> str:
    selector = f"--field-selector=involvedObject.name={job.name},reason={reason}"
    events = job.cluster.get("events", "-n", NAMESPACE, selector)["items"]
    return next((str(event["message"]) for event in events), "")
