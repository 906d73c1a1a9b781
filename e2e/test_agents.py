"""Conversations on a real cluster: the simulated user and a tool in separate Pods. The user's dies in a step."""

from __future__ import annotations

from collections.abc import Callable

from harness import NAMESPACE, Job, Manifest, log_step

NUM_STEPS = 4
USER = """
import time

def respond(messages, state, answer):
    time.sleep(0.3)  # long enough for a fault in the middle of a step
    state["tries"] = state.get("tries", 0) + 1
    letters = messages[-1]["content"].count("e")
    return None if letters > 2 else f"{letters} letters; the answer is {answer}.", letters / 10, {}
"""
TOOL = """
def add(a: int, b: int) -> int:
    return a + b
"""


def kill_user(job: Job) -> None:
    """SIGKILL the Pod of the simulated user: no preStop, no grace period."""
    pods = job.cluster.pods(job.name, "agent")
    [name] = [p["metadata"]["name"] for p in pods if p["metadata"]["labels"]["rljob.dev/agent"] == "user"]
    log_step(f"{job.name}: killing {name}")
    job.cluster.kubectl("delete", "pod", "-n", NAMESPACE, name, "--grace-period=0", "--force")


def test_conversations_train_while_the_user_is_replaced(submit: Callable[..., Job]) -> None:
    toleration = {"key": "rljob.dev/pool", "value": "reward", "effect": "NoSchedule"}
    nodes: Manifest = {"nodeSelector": {"rljob.dev/pool": "reward"}, "tolerations": [toleration]}
    job = submit(
        "agents",
        data={"format": "chat"},
        agent={
            "type": "loop",
            "maxAssistantTurns": 3,
            "user": {"function": {"inline": USER}, "slots": 4, "nodePool": nodes},
            "tools": [{"name": "calc", "function": {"inline": TOOL}, "slots": 1, "nodePool": nodes}],
        },
        # A random model seldom writes its end token: a letter ends most answers.
        rollout={"replicas": 1, "maxModelLen": 1024, "sampling": {"maxTokens": 32, "stop": ["r"]}},
        trainer={"replicas": 1},
        schedule={"steps": NUM_STEPS},
    )
    job.wait_for_step(1)
    assert job.condition("PoolsIsolated").get("status") == "True", "each role has separate nodes"
    assert {"agent-user", "agent-calc"} <= {role["name"] for role in job.status["roles"]}
    kill_user(job)
    job.wait_for_success()
    samples = job.read_samples()
    assert len(samples) == NUM_STEPS * 16
    assert not [sample["failure"] for sample in samples if sample["failure"]], "calls are repeated on the new Pod"
    assert max(len(sample["turns"]) for sample in samples) > 1
    for sample in samples:
        [segment] = sample["segments"]
        turns = [span["turn"] for span in segment["spans"] if span["turn"] >= 0]
        assert turns == list(range(len(sample["turns"]))), "the tokens of each answer are in the segment once"
