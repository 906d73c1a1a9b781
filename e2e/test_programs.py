"""A program on a real cluster: the runner's Pods call the policy through the head's gateway. One dies in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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


def test_program_trains_without_rewards_while_its_runner_is_replaced(submit: Callable[..., Job]) -> None:
    toleration = {"key": "rljob.dev/pool", "value": "reward", "effect": "NoSchedule"}
    nodes: Manifest = {"nodeSelector": {"rljob.dev/pool": "reward"}, "tolerations": [toleration]}
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
    assert len(samples) == NUM_STEPS * 16
    assert not [sample["failure"] for sample in samples if sample["failure"]], "episodes are repeated on the new Pod"
    assert {(sample["end"], len(sample["turns"])) for sample in samples} == {("returned", NUM_TURNS)}
    assert all(sample["own_reward"] == sample["score"] for sample in samples), "the program's reward is the score"
    assert len({sample["own_reward"] for sample in samples}) > 1
    for sample in samples:
        spans = [span for segment in sample["segments"] for span in segment["spans"] if span["turn"] >= 0]
        assert Counter(span["turn"] for span in spans) == {0: 1, 1: 1}, "each answer's tokens are trained once"
