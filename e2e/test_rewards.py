"""Rewards on a real cluster: kinds, groups, hedging, a shared reward that scales, a DNS outage, and a changed reward.

The tests check the trajectory log that the driver writes to the claim: every sample has a valid result of every reward,
by one version of it per step.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from harness import CLAIM, NAMESPACE, Cluster, Job, Manifest, log_step, wait_for
from reward_jobs import files

pytestmark = pytest.mark.each

FOLDER = Path(__file__).parent / "reward_jobs"
DNS_OUTAGE_SECONDS = 10
SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(1)
    return solution_str.count("e") / 10
"""
KILL_REWARD_MODEL = """
import os, pathlib
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"rljob_trainer.rollout.served" in path.read_bytes() and int(path.parent.name) != os.getpid():
        os.kill(int(path.parent.name), 9)
"""
BREVITY = """
class Brevity:
    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 0.0, "length": len(solution_str)}

    def post_process_scores(self, group):
        lengths = [sample["components"]["length"] for sample in group]
        return [{"score": float(length == min(lengths)), "shortest": min(lengths)} for length in lengths]
"""


@pytest.fixture(scope="module")
def reward_files(cluster: Cluster) -> None:
    cluster.unpack_on_claim(files.prepare())


@pytest.fixture(scope="module")
def nodes() -> Manifest:
    """The nodePool of reward Pods."""
    toleration = {"key": "rljob.dev/pool", "value": "reward", "effect": "NoSchedule"}
    return {"nodeSelector": {"rljob.dev/pool": "reward"}, "tolerations": [toleration]}


def read_job(file: str) -> Manifest:
    manifest: Manifest = yaml.safe_load(
        (FOLDER / f"{file}.yaml").read_text().replace("pvc://rljob-e2e", f"pvc://{CLAIM}")
    )
    manifest["spec"]["checkpoint"]["persistentVolumeClaim"]["claimName"] = CLAIM
    manifest["metadata"]["namespace"] = NAMESPACE
    return manifest


def assert_all_valid(samples: list[Manifest], num_samples: int) -> None:
    assert len(samples) == num_samples
    invalid = Counter(r["reason"] for sample in samples for r in sample["rewards"].values() if not r["valid"])
    assert not invalid, invalid


def test_function_classifier_and_judge_score_every_sample(cluster: Cluster, reward_files: None) -> None:
    job = Job(cluster, read_job("three_kinds"))
    job.wait_for_success()
    samples = job.read_samples()
    assert_all_valid(samples, 2 * 16)
    pairs = [(sample["completion"], sample["ground_truth"]) for sample in samples]
    scores = [sample["rewards"]["correct"]["score"] for sample in samples]
    assert scores == files.verify_directly(pairs), "the results of math-verify itself"
    assert {0.0, 1.0} == set(scores), "some are right, some are wrong"
    polite = {sample["rewards"]["polite"]["score"] for sample in samples}
    assert len(polite) > 1
    assert all(0 < score < 1 for score in polite)
    assert {sample["rewards"]["clear"]["score"] for sample in samples} <= {1.0, 2.0, 3.0}


def test_groups_are_compared_and_slow_samples_are_hedged(cluster: Cluster, reward_files: None) -> None:
    cluster.kubectl("delete", "pod", "-n", NAMESPACE, "ranker", "--ignore-not-found", "--wait")
    ranker = (FOLDER / "ranker.yaml").read_text().replace("rljob-e2e", NAMESPACE)
    cluster.kubectl("apply", "-f", "-", input=ranker.encode())
    job = Job(cluster, read_job("groups"))
    job.wait_for_success()
    samples = job.read_samples()
    assert_all_valid(samples, 4 * 16)
    groups = defaultdict(list)
    for sample in samples:
        groups[sample["step"], sample["group"]].append(sample)
    assert len(groups) == 4 * 4
    for group in groups.values():
        lengths = [len(sample["completion"]) for sample in group]
        assert [s["rewards"]["shorter"]["score"] for s in group] == [float(n == min(lengths)) for n in lengths]
        compared = [sample["rewards"]["clearer"]["score"] for sample in group]
        assert sum(compared) == pytest.approx(len(group) / 2), "of two completions one wins, or each gets a half"
    attempts = Counter(sample["rewards"]["moody"]["attempts"] for sample in samples)
    assert attempts[1] > attempts[2] > 0, "some were hedged, none failed"
    cluster.kubectl("delete", "-f", "-", input=ranker.encode())


def test_reward_model_in_the_trainers_pods_scores_every_sample(
    cluster: Cluster, reward_files: None, submit: Callable[..., Job], nodes: Manifest
) -> None:
    """Its vLLM takes turns with the ranks, as the rollouts' does; one that is killed costs no Pod."""
    letters = {"name": "letters", "slots": 4, "function": {"inline": SLOW}, "nodePool": nodes}
    model = {"source": f"pvc://{CLAIM}/classifier", "placement": "trainer", "template": "text", "maxModelLen": 256}
    shared = {"placement": "trainer", "replicas": None, "nodePool": None}
    rewards = [letters, {"name": "polite", "weight": 0.1, "model": {**model, "kvCacheMemory": "256Mi"}}]
    job = submit("shared-reward", rewards=rewards, rollout=shared, trainer={"replicas": 1}, schedule={"steps": 5})
    job.wait_for_step(2)
    pods = cluster.pods(job.name, "trainer")
    assert not cluster.pods(job.name, "rollout")
    servers = [pod for pod in cluster.pods(job.name, "reward") if "polite" in pod["metadata"]["name"]]
    containers = {container["name"] for pod in servers for container in pod["spec"]["containers"]}
    assert containers == {"reward"}, "no vLLM of its own"
    log_step(f"{job.name}: SIGKILL of the reward model's engine at step {job.step()}")
    cluster.kubectl("exec", "-n", NAMESPACE, pods[0]["metadata"]["name"], "--", "python3", "-c", KILL_REWARD_MODEL)
    job.wait_for_success()
    assert_all_valid(job.read_samples(), 5 * 16)
    steps = job.metrics().steps
    assert steps[-1].num_engine_restarts >= 1
    assert all(step.device_bytes["models_asleep"] > 0 for step in steps)


def test_shared_reward_scales_from_zero_and_back(cluster: Cluster, submit: Callable[..., Job], nodes: Manifest) -> None:
    cluster.kubectl("delete", "rewardmodel", "-n", NAMESPACE, "busy", "--ignore-not-found", "--wait")
    cluster.apply(
        {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RewardModel",
            "metadata": {"name": "busy", "namespace": NAMESPACE},
            "spec": {
                "function": {"inline": SLOW},
                "slots": 2,
                "autoscaling": {"minReplicas": 0, "maxReplicas": 3, "targetSeconds": 4, "scaleDownAfterSeconds": 20},
                "nodePool": nodes,
            },
        }
    )

    def read() -> Manifest:
        return cluster.get("rewardmodel", "busy").get("status") or {}

    wait_for("the scaling status of the RewardModel", lambda: read().get("scaling"), 120)
    assert read()["scaling"]["replicas"] == 0, "no job uses it"
    rewards = [{"name": "letters", "rewardModelRef": {"name": "busy"}, "slots": 2}]
    job = submit("scaled", rewards=rewards, schedule={"steps": 4})
    most = job.wait_for("three replicas", lambda: read()["scaling"]["replicas"] == 3 and read()["scaling"])
    log_step(f"busy: {most}")
    job.wait_for("all three ready", lambda: read().get("readyReplicas") == 3)
    job.wait_for_success()
    assert_all_valid(job.read_samples(), 4 * 16)
    wait_for("no replica", lambda: not read().get("replicas"), 180)
    cluster.kubectl("delete", "rewardmodel", "-n", NAMESPACE, "busy", "--wait")


def test_job_survives_a_dns_outage(cluster: Cluster, submit: Callable[..., Job]) -> None:
    if not cluster.is_local:
        pytest.skip("stops the DNS of the cluster: only on the one-machine cluster")
    dns = ("-n", "kube-system", "deployment/coredns")
    job = submit("no-dns")
    job.wait_for_step(2)
    log_step(f"no DNS for {DNS_OUTAGE_SECONDS} s, at step {job.step()}")
    cluster.kubectl("scale", *dns, "--replicas=0")
    try:
        gone = ("-n", "kube-system", "wait", "--for=delete", "pod", "-l", "k8s-app=kube-dns", "--timeout=120s")
        cluster.kubectl(*gone)
        time.sleep(DNS_OUTAGE_SECONDS)  # the fault itself
    finally:
        cluster.kubectl("scale", *dns, "--replicas=1")
    job.wait_for_success()
    assert_all_valid(job.read_samples(), 12 * 16)


def test_changed_reward_scores_complete_steps(cluster: Cluster, submit: Callable[..., Job], nodes: Manifest) -> None:
    """One reward scores samples, and changes during the run; another one scores their groups."""
    reward = {"name": "letters", "slots": 4, "replicas": 2, "function": {"inline": SLOW}, "nodePool": nodes}
    brevity = {
        "name": "brevity",
        "scope": "sampleThenGroup",
        "function": {"inline": BREVITY},
        "slots": 2,
        "nodePool": nodes,
    }
    job = submit("changed", rewards=[reward, brevity])
    job.wait_for_step(3)
    changed = copy.deepcopy([reward, brevity])
    changed[0]["function"] = {"inline": SLOW.replace("/ 10", "/ 20")}
    job.cluster.apply(
        {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": job.name, "namespace": NAMESPACE},
            "spec": cluster.get("rljob", job.name)["spec"] | {"rewards": changed},
        }
    )
    job.wait_for_success()
    samples = job.read_samples()
    assert_all_valid(samples, 12 * 16)
    versions = defaultdict(set)
    for sample in samples:
        versions[sample["step"]].add(sample["rewards"]["letters"]["version"])
    assert {len(found) for found in versions.values()} == {1}, "one version per step"
    assert len(set.union(*versions.values())) == 2, "both versions scored"
    for sample in samples:
        components = sample["rewards"]["brevity"]["components"]
        shown = dict(components)
        assert sample["rewards"]["brevity"]["score"] == float(shown["length"] == shown["shortest"])
    assert {"MixedVersions", "SingleVersion"} <= job.event_reasons()
