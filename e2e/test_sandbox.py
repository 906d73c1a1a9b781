"""Code of the policy in agent-sandbox's Pods on a real cluster, with its controller and a user that a model plays.

The policy is fitted to call the sandbox's tools (tool_model.py): half of its episodes write a file, and all read it in
their next call. What they read shows that an episode keeps its sandbox, and shares it with no other.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tool_model
from harness import CLAIM, NAMESPACE, ROOT, Cluster, CommandError, Job, Manifest, log_step, python, wait_for

HERE = Path(__file__).parent
MODEL = ROOT / ".models/e2e-tools"
NUM_STEPS, NUM_EPISODES = 2, 8
TOOL = "sandboxes-agent-code"
"""Name of the tool's Deployment, warm pool, template, account and policy."""
SANDBOX_KINDS, ACCOUNT_KINDS = "sandboxclaims,sandboxwarmpools,sandboxtemplates", "serviceaccounts,roles,rolebindings"
"""Their objects are deleted after the job's end, and after its deletion."""
SANDBOX = "sandboxes.agents.x-k8s.io"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    results = [message["content"] for message in extra_info["messages"] if message["role"] == "tool"]
    return {"score": float(results[-1:] == ["7"]), "calls": len(results)}
"""
PROBE = """
import sys
from rljob_service.worker.code.agent_sandbox import AgentSandbox
sys.stdout.write(AgentSandbox(60, 8192).run("shell", sys.argv[1], "probe"))
"""
"""Runs a command in a separate sandbox, from a Pod of the tool as its workers do."""


@pytest.fixture
def agent_sandbox(cluster: Cluster) -> None:
    if cluster.is_local:
        log_step("installing agent-sandbox (the first time, some minutes more to build its controller)")
        python("-m", "rljob_cluster", "install-agent-sandbox")
        return
    try:
        cluster.kubectl("get", "crd", "sandboxclaims.extensions.agents.x-k8s.io")
    except CommandError:
        pytest.skip("the cluster has no agent-sandbox with its extensions")


@pytest.fixture
def policy(cluster: Cluster) -> str:
    """Source of the model that calls the tools."""
    if not MODEL.exists():
        log_step("training a model that calls tools (once)")
        python(HERE / "tool_model.py", MODEL)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(MODEL, MODEL.name)
    cluster.unpack_on_claim(archive.getvalue())
    return f"pvc://{CLAIM}/{MODEL.name}"


@pytest.fixture
def user(cluster: Cluster) -> Iterator[str]:
    """URL of the endpoint that plays the user."""
    manifests = (HERE / "sandbox_user.yaml").read_text().replace("namespace: rljob-e2e", f"namespace: {NAMESPACE}")
    cluster.kubectl("delete", "pod", "-n", NAMESPACE, "patron", "--ignore-not-found", "--wait")
    cluster.kubectl("apply", "-f", "-", input=manifests.encode())
    yield f"http://patron.{NAMESPACE}:8000/v1"
    cluster.kubectl("delete", "-f", "-", input=manifests.encode())


class Sandboxes:
    """What exists of a job's sandboxes."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.claims: set[str] = set()
        """Names of all that were seen."""

    def list(self, kinds: str) -> list[Manifest]:
        found: list[Manifest] = self.job.cluster.get(kinds, "-l", f"rljob.dev/job={self.job.name}")["items"]
        return found

    def pool(self) -> Manifest:
        return next(iter(self.list("sandboxwarmpools")), {})

    def tool_pods(self) -> list[Manifest]:
        """Those that are ready."""
        pods = self.job.cluster.pods(self.job.name, "agent")
        return [pod for pod in pods if pod["metadata"]["labels"]["rljob.dev/agent"] == "code" and is_ready(pod)]

    def pods(self) -> list[Manifest]:
        """Those of the sandboxes."""
        return [pod for pod in self.list("pods") if pod["metadata"]["labels"]["rljob.dev/role"] == "sandbox"]

    def are_deleted(self) -> bool:
        # A Sandbox has no label of its job.
        return not (self.list(SANDBOX_KINDS) or self.pods() or self.job.cluster.get(SANDBOX)["items"])

    def observe_claims(self) -> None:
        self.claims |= {claim["metadata"]["name"] for claim in self.list("sandboxclaims")}

    def has_succeeded(self) -> bool:
        self.observe_claims()
        return bool(self.job.condition("Succeeded").get("status") == "True")

    def probe(self, command: str) -> str:
        name = self.tool_pods()[0]["metadata"]["name"]
        flags = ("-n", NAMESPACE, name, "-c", "agent", "--")
        return self.job.cluster.kubectl("exec", *flags, "python", "-c", PROBE, command).decode()


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def build_changes(policy: str, user: str) -> dict[str, Any]:
    """The fields in which the job differs from job.yaml."""
    toleration = {"key": "rljob.dev/pool", "value": "reward", "effect": "NoSchedule"}
    nodes: Manifest = {"nodeSelector": {"rljob.dev/pool": "reward"}, "tolerations": [toleration]}
    small = {"requests": {"cpu": "10m", "memory": "64Mi"}}  # all nodes share the CPUs of one machine
    sandbox = {"provider": "agentSandbox", "languages": ["python", "shell"], "warmReplicas": 3, "resources": small}
    tool = {
        "name": "code",
        "sandbox": sandbox,
        "slots": 4,
        "timeoutSeconds": 120,
        "onError": "invalid",
        "autoscaling": {"minReplicas": 0, "maxReplicas": 2, "targetSeconds": 10},
        "nodePool": nodes,
    }
    model = {
        "endpoint": {"url": user, "model": "patron"},
        "persona": "You are a patron. When you have read a number, answer [DONE].",
        "stop": "[DONE]",
    }
    return {
        "model": {"source": policy},
        "data": {"format": "chat", "eval": None},
        "agent": {"type": "loop", "user": {"model": model, "slots": 8, "nodePool": nodes}, "tools": [tool]},
        "rewards": [{"name": "read", "slots": 4, "function": {"inline": REWARD}, "nodePool": nodes}],
        "algorithm": {"groupSize": 4, "optimizer": {"learningRate": 1e-5}},
        "rollout": {"replicas": 1, "maxModelLen": 1024, "sampling": {"maxTokens": 64}},
        "trainer": {"replicas": 1},
        "schedule": {"steps": NUM_STEPS, "promptsPerStep": 2},
    }


def test_each_episode_has_a_sandbox_until_it_ends(
    cluster: Cluster, submit: Callable[..., Job], agent_sandbox: None, policy: str, user: str
) -> None:
    job = submit("sandboxes", **build_changes(policy, user))
    sandboxes = Sandboxes(job)
    pool = job.wait_for("a warm pool", sandboxes.pool)
    assert pool["spec"]["replicas"] == 0, "nothing demands the tool before the first step"
    job.wait_for("a Pod of the tool", sandboxes.tool_pods)
    assert sandboxes.pool()["spec"]["replicas"] == 3
    check_isolation(sandboxes)
    job.wait_for("Succeeded", sandboxes.has_succeeded)
    wait_for("no sandbox", sandboxes.are_deleted, 60)
    check_samples(job)
    assert len(sandboxes.claims) > NUM_EPISODES, "the probe, and episodes of more than one step"
    cluster.kubectl("delete", "rljob", "-n", NAMESPACE, job.name, "--wait")
    wait_for("no account", lambda: not sandboxes.list(ACCOUNT_KINDS), 60)


def check_isolation(sandboxes: Sandboxes) -> None:
    """What code in a sandbox may do. Its claim is never given back: it ends with the job's pool."""
    assert sandboxes.probe("id -u; pwd; echo kept > file; cat file") == "1000\n/workspace\nkept"
    assert sandboxes.probe("cat file") == "kept", "the next call of the episode has its files"
    denied = "touch /usr/x; cat /proc/1/environ; ls /var/run/secrets/kubernetes.io; env | grep RLJOB_SANDBOX"
    refused = sandboxes.probe(denied)
    assert refused.count("Read-only file system") == 1, refused
    assert refused.count("Permission denied") == 1, refused
    assert refused.count("No such file") == 1, refused
    assert "RLJOB_SANDBOX" not in refused
    pods = sandboxes.pods()
    policies = {each["metadata"]["name"]: each["spec"] for each in sandboxes.list("networkpolicies")}
    selector = policies[f"{TOOL}-sandbox"]["podSelector"]["matchLabels"]
    assert "egress" not in policies[f"{TOOL}-sandbox"], "it allows none; the API server leaves out empty lists"
    assert pods
    for pod in pods:
        assert selector.items() <= pod["metadata"]["labels"].items(), "the NetworkPolicy applies to each Pod"


def check_samples(job: Job) -> None:
    samples = job.read_samples()
    assert len(samples) == NUM_STEPS * NUM_EPISODES
    assert not [sample["failure"] for sample in samples if sample["failure"]]
    num_seen: Counter[str] = Counter()
    read = tool_model.write_call("run_shell", command=tool_model.READ)
    for sample in samples:
        answers = [turn["text"] for turn in sample["turns"]]
        results = [message["content"] for message in json.loads(sample["messages"]) if message["role"] == "tool"]
        for code, expected in tool_model.RESULTS.items():
            if answers[:2] == [tool_model.write_call("run_python", code=code), read]:  # else it wrote no call
                assert tuple(results[:2]) == expected, "a file is in the sandbox of the episode that wrote it alone"
                num_seen[code] += 1
    log_step(f"{job.name}: episodes by their first call: {dict(num_seen)}")
    assert set(num_seen) == set(tool_model.RESULTS)


@pytest.mark.each
def test_lost_sandboxes_and_a_suspension_cost_no_prompt(
    submit: Callable[..., Job], agent_sandbox: None, policy: str, user: str
) -> None:
    changes = build_changes(policy, user)
    num_steps = 6
    changes["schedule"] |= {"steps": num_steps}
    changes["agent"]["tools"][0] |= {"onError": "message"}
    job = submit("lost-sandboxes", **changes)
    sandboxes = Sandboxes(job)
    job.wait_for("a Pod of the tool", sandboxes.tool_pods)
    assert sandboxes.probe("echo kept > file; cat file") == "kept"
    lose_sandboxes(sandboxes)
    job.wait_for("a sandbox without the files", lambda: read_probe(sandboxes, "cat file || echo lost").endswith("lost"))
    job.wait_for_step(job.step() + 1)
    suspend_and_resume(sandboxes)
    job.wait_for_success()
    trained = [prompt for step in job.metrics().prompts_trained for prompt in step]
    assert len(trained) == len(set(trained)) == num_steps * changes["schedule"]["promptsPerStep"]
    wait_for("no sandbox", sandboxes.are_deleted, 60)


def lose_sandboxes(sandboxes: Sandboxes) -> None:
    """SIGKILL all Pods of sandboxes, those with an episode and those of the warm pool."""
    names = [pod["metadata"]["name"] for pod in sandboxes.pods()]
    assert names
    log_step(f"{sandboxes.job.name}: killing {', '.join(names)}")
    sandboxes.job.cluster.kubectl("delete", "pod", "-n", NAMESPACE, *names, "--grace-period=0", "--force")


def read_probe(sandboxes: Sandboxes, command: str) -> str:
    """Return what the command writes; the error while the sandbox is lost."""
    try:
        return sandboxes.probe(command)
    except CommandError as error:
        return str(error)


def suspend_and_resume(sandboxes: Sandboxes) -> None:
    job = sandboxes.job
    job.cluster.rljob("suspend", job.name)
    job.wait_for("no sandbox and no Pod", lambda: sandboxes.are_deleted() and not sandboxes.list("pods"))
    assert job.status["phase"] == "Suspended"
    job.cluster.rljob("resume", job.name)
