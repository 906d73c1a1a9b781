"""A program on a real cluster: the runner's Pods call the policy through the head's gateway. One dies in a step. They
exist only while episodes need them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from harness import NAMESPACE, Job, Manifest, log_step

NUM_STEPS = 3
NUM_TURNS = 2
PROGRAM = f"""
import json
import time
import urllib.request


def run(messages, base_url, api_key):
    messages, letters = list(messages), 0
    for _ in range({NUM_TURNS}):
        message = ask(base_url, api_key, messages)
        letters += (message["content"] or "").count("e")
        messages += [message, {{"role": "user", "content": "Another one."}}]
        time.sleep(0.3)  # long enough for a fault in the middle of a step
    return letters / 10, {{"letters": letters}}


def ask(base_url, api_key, messages):
    body = json.dumps({{"model": "policy", "messages": messages}}).encode()
    headers = {{"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["choices"][0]["message"]
"""
"""It needs no package, so that the cluster needs no package index."""
NUM_SAMPLES = 16
SCORE_SECONDS = 40
SLOW_REWARD = f"""
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({SCORE_SECONDS})
    return 0.0
"""


@pytest.fixture
def nodes() -> Manifest:
    """The nodePool of the runner."""
    toleration = {"key": "rljob.dev/pool", "value": "reward", "effect": "NoSchedule"}
    return {"nodeSelector": {"rljob.dev/pool": "reward"}, "tolerations": [toleration]}


def kill_runner(job: Job) -> None:
    """SIGKILL the runner's Pod: no preStop, no grace period. Its episodes are repeated on the new one."""
    (pod,) = job.cluster.pods(job.name, "agent")
    name = pod["metadata"]["name"]
    log_step(f"{job.name}: killing {name}")
    job.cluster.kubectl("delete", "pod", "-n", NAMESPACE, name, "--grace-period=0", "--force")


def find_gateway_peers(job: Job) -> list[Manifest]:
    """The Pods that may reach the gateway."""
    rules = job.cluster.get("networkpolicy", f"{job.name}-head")["spec"]["ingress"]
    return [
        peer for rule in rules if {"protocol": "TCP", "port": 8300} in rule.get("ports", ()) for peer in rule["from"]
    ]


def read_replicas(job: Job, name: str) -> int | None:
    """The autoscaler's last decision; None: none yet."""
    return next((each["replicas"] for each in job.status.get("scaling") or () if each["name"] == name), None)


def test_program_trains_without_rewards_while_its_runner_is_replaced(
    submit: Callable[..., Job], nodes: Manifest
) -> None:
    job = submit(
        "programs",
        data={"format": "chat"},
        rewards=[],
        agent={
            "type": "program",
            "runner": {"function": {"inline": PROGRAM}, "slots": 4, "timeoutSeconds": 120, "nodePool": nodes},
        },
        # A random model seldom writes its end token: a letter ends most answers.
        rollout={"replicas": 1, "maxModelLen": 1024, "sampling": {"maxTokens": 32, "stop": ["r"]}},
        trainer={"replicas": 1},
        schedule={"steps": NUM_STEPS},
    )
    job.wait_for_step(1)
    assert job.condition("PoolsIsolated").get("status") == "True", "each role has separate nodes"
    assert [role["name"] for role in job.status["roles"]][-1] == "agent-runner"
    assert not job.status.get("rewards"), "there are no rewards to count"
    (runner,) = job.cluster.pods(job.name, "agent")
    (peer,) = find_gateway_peers(job)
    assert peer["podSelector"]["matchLabels"].items() <= runner["metadata"]["labels"].items()
    kill_runner(job)
    job.wait_for_success()
    samples = job.read_samples()
    assert len(samples) == NUM_STEPS * NUM_SAMPLES
    assert not [sample["failure"] for sample in samples if sample["failure"]], "episodes are repeated on the new Pod"
    assert {(sample["end"], len(sample["turns"])) for sample in samples} == {("returned", NUM_TURNS)}
    assert all(sample["own_reward"] == sample["score"] for sample in samples), "the program's reward is the score"
    assert len({sample["own_reward"] for sample in samples}) > 1
    for sample in samples:
        spans = [span for segment in sample["segments"] for span in segment["spans"] if span["turn"] >= 0]
        assert Counter(span["turn"] for span in spans) == {0: 1, 1: 1}, "each answer's tokens are trained once"


@pytest.mark.each
def test_runners_scale_from_zero_and_back(submit: Callable[..., Job], nodes: Manifest) -> None:
    """The last scores arrive long after the last episode: nothing needs a runner meanwhile."""
    scaling = {"minReplicas": 0, "maxReplicas": 2, "scaleDownAfterSeconds": 5}
    runner = {"function": {"inline": PROGRAM}, "slots": 4, "timeoutSeconds": 120, "nodePool": nodes}
    slow = {"name": "slow", "function": {"inline": SLOW_REWARD}, "slots": NUM_SAMPLES, "timeoutSeconds": 120}
    job = submit(
        "scaled-runner",
        data={"format": "chat"},
        rewards=[slow | {"nodePool": nodes}],
        agent={"type": "program", "runner": runner | {"autoscaling": scaling}},
        rollout={"replicas": 1, "maxModelLen": 1024, "sampling": {"maxTokens": 32, "stop": ["r"]}},
        trainer={"replicas": 1},
        schedule={"steps": 2},
    )
    job.wait_for("the first decision", lambda: read_replicas(job, "runner") is not None)
    job.wait_for("two runners", lambda: read_replicas(job, "runner") == 2)
    (record,) = job.status["scaling"]
    assert "episodes at once" in record["message"], record
    job.wait_for_step(1)
    job.wait_for("no runner after the last episode", lambda: read_replicas(job, "runner") == 0)
    job.wait_for("no Pod of a runner", lambda: not job.cluster.pods(job.name, "agent"))
    job.wait_for_success()
    events = job.cluster.get("events", f"--field-selector=involvedObject.name={job.name}")["items"]
    scaled = [event["message"] for event in events if event["reason"].startswith("Scaled")]
    assert any(message.startswith("runner from 0 to 2 Pods: wants ") for message in scaled), scaled
    assert any(message.startswith("runner from 2 to 0 Pods: ") for message in scaled), scaled
    samples = job.read_samples()
    assert len(samples) == 2 * NUM_SAMPLES
    assert {sample["end"] for sample in samples} == {"returned"}, "episodes wait for a Pod"
    assert all(sample["rewards"]["slow"]["valid"] for sample in samples)
