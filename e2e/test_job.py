"""The plain job from apply to Succeeded, and the same job with faults.

Exact resume is the promise: whatever failed, the job trains on the prompts of the undisturbed run, in the same order.
CI runs the plain job and several faults in one run; `make e2e-faults` also runs every fault alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from harness import CLAIM, NAMESPACE, OPERATOR_NAMESPACE, Cluster, Job, log_step, wait_for

from rljob_api.run.summaries import DriverSummary

NUM_STEPS = 12


@pytest.fixture(scope="session")
def plain(submit: Callable[..., Job]) -> tuple[Job, DriverSummary]:
    """The undisturbed run; the reference for runs with faults."""
    job = submit("plain")
    job.wait_for_step(1)
    assert job.condition("PoolsIsolated").get("status") == "True", "each role has a separate node"
    return job, job.wait_for_success()


def test_applied_job_trains_and_writes_checkpoint_metrics_and_events(
    cluster: Cluster, plain: tuple[Job, DriverSummary]
) -> None:
    job, summary = plain
    status = job.status
    assert status["phase"] == "Succeeded"
    assert status["progress"]["step"] == NUM_STEPS
    assert len(job.metrics().prompts_trained) == NUM_STEPS
    assert len(set(summary.weight_digests.values())) == 1, "every rollout serves the published weights"
    assert len(job.metrics().steps) == NUM_STEPS
    assert cluster.read_file(f"{job.name}/checkpoints/step-{NUM_STEPS:06d}/COMPLETE") is not None
    assert "model_type" in json.loads(cluster.read_file(f"{job.name}/export/config.json") or "{}")
    assert {"Running", "JobSucceeded"} <= job.event_reasons()
    cluster.kubectl("wait", "-n", NAMESPACE, f"rljob/{job.name}", "--for=condition=Succeeded", "--timeout=5s")


def test_rollouts_in_the_pods_of_trainers_train_on_the_same_prompts(
    submit: Callable[..., Job], plain: tuple[Job, DriverSummary]
) -> None:
    """Trainer and rollouts take turns; an engine that is killed costs no Pod and no prompt."""
    job = submit("shared", rollout={"placement": "trainer", "replicas": None, "nodePool": None})
    job.wait_for_step(2)
    assert not job.cluster.pods(job.name, "rollout")
    inject_fault(kill_engine, job)
    summary = job.wait_for_success()
    assert len(set(summary.weight_digests.values())) == 1
    metrics = job.metrics()
    assert metrics.prompts_trained == plain[0].metrics().prompts_trained
    assert all(step.turn_seconds.keys() >= {"sleep", "wake"} for step in metrics.steps)
    assert metrics.steps[-1].num_engine_restarts >= 1


def kill_engine(job: Job) -> None:
    """SIGKILL the engine core of the first trainer Pod."""
    pod = job.wait_for("a trainer Pod", lambda: job.cluster.pods(job.name, "trainer"))[0]["metadata"]["name"]
    kill = (
        "import os, pathlib\n"
        "for path in pathlib.Path('/proc').glob('[0-9]*/comm'):\n"
        "    path.read_text().startswith('VLLM::EngineCor') and os.kill(int(path.parent.name), 9)"
    )
    job.cluster.kubectl("exec", "-n", NAMESPACE, pod, "--", "python3", "-c", kill)


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


def test_job_survives_several_faults_in_one_run(submit: Callable[..., Job], plain: tuple[Job, DriverSummary]) -> None:
    job = submit("faults")
    job.wait_for_step(1)
    inject_fault(kill_reward, job)
    inject_fault(delete_rollout, job)
    job.wait_for_step(4)
    inject_fault(delete_head, job)
    inject_fault(kill_operator, job)
    job.wait_for_step(7)
    inject_fault(suspend_and_resume, job)
    job.wait_for_success()
    assert job.metrics().prompts_trained == plain[0].metrics().prompts_trained


def test_job_starts_from_the_model_of_another_and_keeps_it(
    cluster: Cluster, submit: Callable[..., Job], plain: tuple[Job, DriverSummary]
) -> None:
    """The Pods mount the claim of the other job read-only, and a new head has the same step."""
    source = f"job://{plain[0].name}@last"
    job = submit("longer", model={"source": source}, schedule={"steps": 6})
    placed = job.wait_for("the claim", lambda: job.status.get("startModel"))
    assert (placed["job"], placed["claim"]) == (plain[0].name, CLAIM)
    job.wait_for_step(3)
    assert job.status["startModel"]["step"] == NUM_STEPS
    pin = json.loads(cluster.read_file(f"{job.name}/model.json") or "{}")
    assert (pin["source"], pin["step"]) == (source, NUM_STEPS)
    inject_fault(delete_head, job)
    summary = job.wait_for_success()
    assert len(set(summary.weight_digests.values())) == 1
    assert json.loads(cluster.read_file(f"{job.name}/model.json") or "{}") == pin


@pytest.mark.each
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_job_survives(
    fault: Callable[[Job], None], submit: Callable[..., Job], plain: tuple[Job, DriverSummary]
) -> None:
    job = submit(fault.__name__.replace("_", "-"))
    job.wait_for_step(2)
    inject_fault(fault, job)
    job.wait_for_success()
    assert job.metrics().prompts_trained == plain[0].metrics().prompts_trained
