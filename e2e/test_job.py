"""The plain job from apply to Succeeded, and the same job with faults.

Exact resume is the promise: whatever failed, the job trains on the prompts of the undisturbed run, in the same order.
CI runs the plain job and several faults in one run; `make e2e-faults` also runs every fault alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from harness import NAMESPACE, OPERATOR_NAMESPACE, Cluster, Job, Manifest, log_step, wait_for

NUM_STEPS = 12


@pytest.fixture(scope="session")
def plain(submit: Callable[..., Job]) -> tuple[Job, Manifest]:
    """The undisturbed run; the reference for runs with faults."""
    job = submit("plain")
    job.wait_for_step(1)
    assert job.condition("PoolsIsolated").get("status") == "True", "each role has a separate node"
    return job, job.wait_for_success()


def test_applied_job_trains_and_writes_checkpoint_metrics_and_events(
    cluster: Cluster, plain: tuple[Job, Manifest]
) -> None:
    job, summary = plain
    status = job.status
    assert status["phase"] == "Succeeded"
    assert status["progress"]["step"] == NUM_STEPS
    assert len(summary["prompts_trained"]) == NUM_STEPS
    assert len(set(summary["weight_digests"].values())) == 1, "every rollout serves the published weights"
    metrics = (cluster.read_file(f"{job.name}/metrics.jsonl") or "").splitlines()
    assert sum('"type": "step"' in line for line in metrics) == NUM_STEPS
    assert cluster.read_file(f"{job.name}/checkpoints/step-{NUM_STEPS:06d}/COMPLETE") is not None
    assert "model_type" in json.loads(cluster.read_file(f"{job.name}/export/config.json") or "{}")
    assert {"Running", "JobSucceeded"} <= job.event_reasons()
    cluster.kubectl("wait", "-n", NAMESPACE, f"rljob/{job.name}", "--for=condition=Succeeded", "--timeout=5s")


def delete_rollout(job: Job) -> None:
    job.delete_pod("rollout")


def delete_trainer(job: Job) -> None:
    job.delete_pod("trainer")


def delete_head(job: Job) -> None:
    job.delete_pod("head")


def kill_reward(job: Job) -> None:
    """SIGKILL a reward Pod during its executions: no preStop, no grace period."""
    pod = job.wait_for("a reward Pod", lambda: job.cluster.pods(job.name, "reward"))[0]["metadata"]["name"]
    job.cluster.kubectl("delete", "pod", "-n", NAMESPACE, pod, "--grace-period=0", "--force")


def kill_operator(job: Job) -> None:
    """Kill the leader of the operator, and wait until another replica leads."""
    cluster = job.cluster

    def read_leader() -> str:
        lease = cluster.kubectl("get", "lease", "rljob-operator", "-n", OPERATOR_NAMESPACE, "-o", "json")
        return str(json.loads(lease)["spec"].get("holderIdentity") or "")

    before = read_leader()
    selector = ("-l", "app.kubernetes.io/name=rljob-operator")
    cluster.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, *selector, "--grace-period=0", "--force")
    wait_for("a new leader of the operator", lambda: read_leader() not in ("", before), 120)


def drain_node(job: Job) -> None:
    """Drain the node of trainers and head. The pool has no other node, so the job waits until uncordon."""
    node = job.wait_for("a trainer Pod", lambda: job.cluster.pods(job.name, "trainer"))[0]["spec"]["nodeName"]
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s")
    try:
        job.cluster.kubectl("drain", node, *flags)
        job.wait_for("the Unschedulable event", lambda: "Unschedulable" in job.event_reasons())
    finally:
        job.cluster.kubectl("uncordon", node)


def suspend_and_resume(job: Job) -> None:
    patch = ("patch", "rljob", "-n", NAMESPACE, job.name, "--type=merge", "-p")
    job.cluster.kubectl(*patch, '{"spec":{"suspend":true}}')
    job.wait_for("no Pod", lambda: not job.cluster.get("pods", "-l", f"rljob.dev/job={job.name}")["items"])
    assert job.status["phase"] == "Suspended"
    job.cluster.kubectl(*patch, '{"spec":{"suspend":false}}')


FAULTS = (delete_rollout, kill_reward, delete_trainer, delete_head, kill_operator, drain_node, suspend_and_resume)


def inject_fault(fault: Callable[[Job], None], job: Job) -> None:
    log_step(f"{job.name}: {fault.__name__} at step {job.step()}")
    fault(job)


def test_job_survives_several_faults_in_one_run(submit: Callable[..., Job], plain: tuple[Job, Manifest]) -> None:
    job = submit("faults")
    job.wait_for_step(1)
    inject_fault(kill_reward, job)
    inject_fault(delete_rollout, job)
    job.wait_for_step(4)
    inject_fault(delete_head, job)
    inject_fault(kill_operator, job)
    job.wait_for_step(7)
    inject_fault(suspend_and_resume, job)
    assert job.wait_for_success()["prompts_trained"] == plain[1]["prompts_trained"]


@pytest.mark.each
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_job_survives(fault: Callable[[Job], None], submit: Callable[..., Job], plain: tuple[Job, Manifest]) -> None:
    job = submit(fault.__name__.replace("_", "-"))
    job.wait_for_step(2)
    inject_fault(fault, job)
    assert job.wait_for_success()["prompts_trained"] == plain[1]["prompts_trained"]
