"""Jobs without a claim on a real cluster: only the head has the run's files, and trainers come and go.

The claim of the tests has the model and the data alone; what the run wrote is read from the head's Pod.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from harness import NAMESPACE, Cluster, CommandError, Job, Manifest

from rljob_api.run.metrics import parse_metrics

NUM_STEPS = 12


class JobWithoutClaim:
    """A job whose trainers have one Pod, or two."""

    def __init__(self, submit: Callable[..., Job], name: str, **changes: Manifest) -> None:
        self.job = submit(name, checkpoint={"everySteps": 2, "persistentVolumeClaim": None}, **changes)

    @property
    def cluster(self) -> Cluster:
        return self.job.cluster

    def read(self, path: str) -> str:
        """Return a file of the run; empty if there is none, or no head."""
        for pod in self.cluster.pods(self.job.name, "head"):
            command = ("cat", f"/var/lib/rljob/{path}")
            try:
                return self.cluster.kubectl("exec", "-n", NAMESPACE, pod["metadata"]["name"], "--", *command).decode()
            except CommandError:
                continue
        return ""

    def step(self) -> int:
        return parse_metrics(self.read("metrics.jsonl").split("\n")).last_step

    def wait_for_step(self, step: int) -> None:
        self.job.wait_for(f"step {step}", lambda: self.step() >= step)

    def wait_for_success(self) -> None:
        self.job.wait_for("Succeeded", lambda: self.job.condition("Succeeded").get("status") == "True")


def delete_trainer_by_force(run: JobWithoutClaim) -> None:
    pod = run.job.wait_for("a trainer Pod", lambda: run.cluster.pods(run.job.name, "trainer"))[0]["metadata"]["name"]
    run.cluster.kubectl("delete", "pod", "-n", NAMESPACE, pod, "--grace-period=0", "--force")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.each), 2])
def test_deleted_trainer_costs_no_prompt(submit: Callable[..., Job], replicas: int) -> None:
    run = JobWithoutClaim(
        submit, f"no-claim-{replicas}", trainer={"replicas": replicas}, schedule={"steps": 60, "promptsPerStep": 4}
    )
    run.wait_for_step(3)
    head = run.cluster.pods(run.job.name, "head")[0]["metadata"]["uid"]
    delete_trainer_by_force(run)
    run.wait_for_step(6)
    prompts = parse_metrics(run.read("metrics.jsonl").split("\n")).prompts_trained
    trained = [prompt for step in prompts for prompt in step]
    assert len(trained) == len(set(trained)), "a prompt was trained on twice"
    assert run.cluster.pods(run.job.name, "head")[0]["metadata"]["uid"] == head
    assert run.job.condition("ProgressLost") == {}
    assert "are deleted with the head's Pod" in run.job.event_messages("Running")
    patch = json.dumps({"spec": {"schedule": {"steps": run.step() + 2}}})
    run.cluster.kubectl("patch", "rljob", "-n", NAMESPACE, run.job.name, "--type=merge", "-p", patch)
    run.wait_for_success()


@pytest.mark.each
def test_deleted_head_starts_again_and_says_what_was_lost(submit: Callable[..., Job]) -> None:
    run = JobWithoutClaim(submit, "no-claim-head", schedule={"steps": NUM_STEPS, "promptsPerStep": 4})
    run.wait_for_step(3)
    run.job.wait_for("progress in the status", lambda: run.job.status["progress"]["step"] >= 1)
    run.job.delete_pod("head")
    run.job.wait_for("the condition ProgressLost", lambda: run.job.condition("ProgressLost").get("status") == "True")
    assert "set spec.checkpoint.persistentVolumeClaim" in run.job.condition("ProgressLost")["message"]
    run.wait_for_success()
    assert "its files were deleted" in run.job.condition("Succeeded")["message"]
