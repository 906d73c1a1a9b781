"""Failure scenarios on a real cluster: missing, full or wrong things appear in a condition, an Event and `kubectl
rljob explain`, and the job resumes automatically once the cause is fixed.

Nothing trains: see failure_scenarios/job.yaml. Each test has a separate namespace. `make e2e` runs the scenarios of an
image, a shared RewardModel and `helm test`; `make e2e-faults` runs all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from failure_scenarios.scenario import RECOVERY_TIMEOUT_SECONDS, Scenario
from harness import OPERATOR_NAMESPACE, Cluster, CommandError, Manifest, execute, log_step, wait_for

from rljob_api.wire.contract import PORT_DRIVER, UrlPath

POOL = {"rljob.dev/pool": "reward"}
BROKEN = "raise RuntimeError('the corpus of the reward is missing')\n"
SOUND = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
TOLERATED = [{"key": "rljob.dev/pool", "operator": "Exists"}]


@pytest.fixture
def scenario(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Scenario]:
    name = "rljob-e2e-" + re.sub(r"[^a-z]+", "-", request.node.name.removeprefix("test_"))[:40].strip("-")
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait")
    cluster.kubectl("create", "namespace", name)
    yield Scenario(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def assert_explained(scenario: Scenario, warning: str, command: str, name: str = "job") -> None:
    """`explain` shows the message of the warning once, and the command to run next."""
    explanation = scenario.explain(name)
    assert explanation["remedies"].count(warning) == 1, explanation
    assert any(line.startswith(command) for line in explanation["next"]), explanation["next"]


def test_missing_image(scenario: Scenario) -> None:
    scenario.submit(rollout={"image": "registry.invalid/none:1"})
    warning = scenario.wait_for_warning(
        "ImagePull", ("registry.invalid/none:1", "spec.rollout.image", "imagePullSecrets")
    )
    assert_explained(scenario, warning, "kubectl edit rljob job")
    scenario.kubectl(
        "patch", "rljob", "job", "--type=merge", "-p", '{"spec":{"rollout":{"image":"rljob/reward:0.2.0-dev"}}}'
    )
    scenario.wait_until_healthy(warning)


@pytest.mark.each
def test_node_pool_without_nodes(scenario: Scenario) -> None:
    scenario.submit(rollout={"nodePool": {"nodeSelector": {"rljob.dev/e2e": "yes"}, "tolerations": TOLERATED}})
    warning = scenario.wait_for_warning(
        "Unschedulable",
        ("spec.rollout.nodePool", "it requires nodes with rljob.dev/e2e=yes", "nodes are available"),
    )
    assert_explained(scenario, warning, "kubectl get nodes --show-labels")
    selector = ",".join(f"{key}={value}" for key, value in POOL.items())
    scenario.kubectl("label", "node", "-l", selector, "rljob.dev/e2e=yes")
    try:
        scenario.wait_until_healthy(warning)
    finally:
        scenario.kubectl("label", "node", "-l", selector, "rljob.dev/e2e-")


@pytest.mark.each
def test_claim_that_is_missing_and_then_unbound(scenario: Scenario) -> None:
    scenario.submit(checkpoint={"persistentVolumeClaim": {"claimName": "runs"}})
    field = "spec.checkpoint.persistentVolumeClaim.claimName"
    scenario.wait_for_warning("ReferenceMissing", (f"{field}: PersistentVolumeClaim runs does not exist",))
    claim, volume = build_claim(scenario.namespace)
    scenario.apply(claim)
    unbound = scenario.wait_for_warning("VolumeUnbound", ("unbound", "runs", field))
    assert_explained(scenario, unbound, "kubectl describe pvc")
    scenario.apply(volume)
    try:
        scenario.wait_until_healthy(unbound)
    finally:
        scenario.kubectl("delete", "pv", volume["metadata"]["name"], "--wait=false")


def build_claim(namespace: str) -> tuple[Manifest, Manifest]:
    """A claim, and the volume that the claim requests."""
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
def test_full_quota(scenario: Scenario) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team"},
        "spec": {"hard": {"limits.memory": "1Gi"}},
    }
    scenario.apply(quota)
    scenario.submit()  # the quota counts limits, and no Pod specifies any
    unnamed = scenario.wait_for_warning(
        "QuotaUnspecified", ("quota team requires limits.memory", "spec.rollout.resources")
    )
    assert_explained(scenario, unnamed, "kubectl edit rljob job")
    small = {"resources": {"limits": {"memory": "128Mi"}}}
    scenario.submit(
        head=small, trainer=small, rollout={"resources": {"limits": {"memory": "1Gi"}}}, rewards=with_memory()
    )
    full = scenario.wait_for_warning(
        "QuotaExceeded", ("exceeds quota team with limits.memory=1Gi", "ResourceQuota", "spec.rollout.resources")
    )
    assert_explained(scenario, full, "kubectl describe resourcequota")
    quota["spec"] = {"hard": {"limits.memory": "4Gi"}}
    scenario.apply(quota)
    scenario.wait_until_healthy(full)


def with_memory() -> list[Manifest]:
    return [build_reward(function={"inline": SOUND}) | {"resources": {"limits": {"memory": "512Mi"}}}]


def build_reward(**kind: Manifest) -> Manifest:
    served = {"slots": 1, "nodePool": {"nodeSelector": POOL, "tolerations": TOLERATED}}
    return {"name": "any"} | kind | (served if "function" in kind else {})


def build_source(text: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scoring"}, "data": {"score.py": text}}


FROM_SOURCE = {"configMapKeyRef": {"name": "scoring", "key": "score.py"}}


@pytest.mark.each
def test_rollout_that_cannot_start_because_of_its_configuration(scenario: Scenario) -> None:
    """The message is the program's own, and not the log that follows it. The job fails without a second attempt."""
    cause = "spec.rollout.maxModelLen: vLLM does not start: max_model_len is too long"
    program = f"""
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.termination import end_program
code = end_program({cause!r}, ExitCode.USER)
print("a library says goodbye")
sys.exit(code)
"""
    sound = yaml.safe_load((Path(__file__).parent / "failure_scenarios/job.yaml").read_text())["spec"]["rollout"]
    [container] = sound["template"]["spec"]["containers"]
    broken = {"name": "rollout", "command": ["python", "-c", program], "lifecycle": None}
    scenario.submit(rollout={"template": {"spec": {"containers": [broken]}}})
    warning = scenario.wait_for_warning("UserError", (f"rollout: {cause}",), condition="Failed")
    assert warning == f"rollout: {cause}"
    assert_failed(scenario, warning)
    scenario.submit(rollout={"template": {"spec": {"containers": [container]}}})
    scenario.wait_until_healthy()


@pytest.mark.each
def test_reward_function_that_raises_on_import(scenario: Scenario) -> None:
    """The job fails and releases its nodes. A changed spec restarts it, or a retry after a changed ConfigMap."""
    fragments = ("reward-any", "the corpus of the reward is missing", "fix spec.rewards[0].function")
    scenario.submit(rewards=[build_reward(function={"inline": BROKEN})])
    assert_failed(scenario, scenario.wait_for_warning("UserError", fragments, condition="Failed"))
    scenario.apply(build_source(SOUND))
    scenario.submit(rewards=[build_reward(function=FROM_SOURCE)])
    scenario.wait_until_healthy()
    scenario.apply(build_source(BROKEN))
    scenario.kubectl("delete", "pod", "-l", "rljob.dev/role=reward")  # a new Pod reads the changed ConfigMap
    assert_failed(scenario, scenario.wait_for_warning("UserError", fragments, condition="Failed"))
    scenario.apply(build_source(SOUND))
    scenario.rljob("resume", "--retry", "job")
    scenario.wait_until_healthy()


def assert_failed(scenario: Scenario, warning: str) -> None:
    explanation = scenario.explain()
    assert warning in explanation["why"]
    assert explanation["next"][-1] == f"kubectl rljob resume --retry job -n {scenario.namespace}"
    wait_for("released nodes", lambda: not scenario.pods(), RECOVERY_TIMEOUT_SECONDS)


@pytest.mark.parametrize("role", ["head", "trainer", "rollout", "reward"])
def test_typo_in_a_template_is_refused_when_it_is_applied(role: str, scenario: Scenario) -> None:
    typo = {"template": {"spec": {"nodeSelectr": {"pool": "none"}}}}
    path = "spec.rewards[0]" if role == "reward" else f"spec.{role}"
    changes = {"rewards": [build_reward(function={"inline": SOUND}) | typo]} if role == "reward" else {role: typo}
    with pytest.raises(CommandError) as refused:
        scenario.submit(**changes)
    assert f"{path}.template.spec.nodeSelectr" in str(refused.value)
    assert not scenario.get("rljobs")["items"]


HOSTILE_DRIVER = f"""
import gzip
import http.server
import json
import sys
import time

ANSWERS = {{
    "large": json.dumps({{"waits_for": "x" * 1_000_000}}).encode(),
    "not a number": b'{{"step": 1, "reward": NaN, "demand": {{"any": {{"samples": 1%s}}}}}}' % (b"0" * 400),
    "compressed": gzip.compress(b" " * 1_500_000_000),
}}


class Driver(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "{UrlPath.READY}":
            self.send_response(200)
            self.end_headers()
            return
        kind = sys.argv[1]
        if kind == "redirect":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest")
            self.end_headers()
            return
        body = ANSWERS.get(kind) or json.dumps({{"step": int(time.time()) % 100_000, "total_steps": 100_000}}).encode()
        self.send_response(200)
        if kind == "compressed":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for byte in range(len(body)) if kind == "slow" else ():
            self.wfile.write(body[byte : byte + 1])
            time.sleep(1)
        if kind != "slow":
            self.wfile.write(body)


http.server.ThreadingHTTPServer(("", {PORT_DRIVER}), Driver).serve_forever()
"""
HOSTILE = ("large", "not a number", "compressed", "redirect", "slow")


def test_hostile_drivers_hurt_no_other_job(cluster: Cluster, scenario: Scenario) -> None:
    kinds = ("healthy", *HOSTILE)
    for kind in kinds:
        head = {"name": "head", "command": ["python", "-c", HOSTILE_DRIVER, kind]}
        template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [head]}}
        elsewhere = build_reward(http={"url": "http://rewards.invalid"})
        scenario.submit(kind.replace(" ", "-"), head={"template": template}, rewards=[elsewhere])
    for kind in kinds:
        wait_for(f"{kind} running", partial(is_running, scenario, kind.replace(" ", "-")))
    before = {pod["metadata"]["uid"] for pod in read_operators(cluster)}

    def read_step() -> int:
        return int(scenario.get("rljob", "healthy")["status"]["progress"]["step"])

    first = wait_for("the healthy job's progress", read_step, RECOVERY_TIMEOUT_SECONDS)
    wait_for("more of it", lambda: read_step() > first, RECOVERY_TIMEOUT_SECONDS)
    for kind in HOSTILE:
        name = kind.replace(" ", "-")
        reported = wait_for(
            f"what is wrong with the answer of {kind}",
            lambda name=name: scenario.get("rljob", name)["status"]["progress"].get("waitsFor"),
            RECOVERY_TIMEOUT_SECONDS,
        )
        log_step(f"{name}: {reported}")
        assert is_running(scenario, name)
    operators = read_operators(cluster)
    assert {pod["metadata"]["uid"] for pod in operators} == before
    assert not any(status["restartCount"] for pod in operators for status in pod["status"]["containerStatuses"])


def is_running(scenario: Scenario, name: str) -> bool:
    return bool(scenario.condition("Running", name).get("status") == "True")


def read_operators(cluster: Cluster) -> list[Manifest]:
    selector = ("-l", "app.kubernetes.io/name=rljob-operator")
    found = cluster.kubectl("get", "pods", "-n", OPERATOR_NAMESPACE, *selector, "-o", "json")
    return list(json.loads(found)["items"])


def build_model(**spec: object) -> Manifest:
    pool = {"nodeSelector": POOL, "tolerations": TOLERATED}
    fields = {"slots": 1, "nodePool": pool, "function": {"inline": SOUND}} | spec
    kind = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RewardModel"}
    return kind | {"metadata": {"name": "style"}, "spec": fields}


def test_reward_model_in_use_is_shared_scaled_deleted_and_recreated(scenario: Scenario) -> None:
    scenario.apply(build_model())
    for name in ("one", "two"):
        scenario.submit(name, rewards=[build_reward(rewardModelRef={"name": "style"})])
    for name in ("one", "two"):
        scenario.wait_until_healthy(name=name)
    assert re.search(r"NAME +READY +REPLICAS +P95 +AGE\nstyle +True +1 ", scenario.kubectl("get", "rewardmodel"))
    scenario.kubectl("scale", "rewardmodel", "style", "--replicas=2")
    wait_for(
        "two Pods",
        lambda: scenario.get("rewardmodel", "style")["status"].get("readyReplicas") == 2,
        RECOVERY_TIMEOUT_SECONDS,
    )
    scenario.kubectl("delete", "rewardmodel", "style")
    for name in ("one", "two"):
        fragments = ("RewardModel style does not exist; create it", "spec.rewards[0].rewardModelRef")
        warning = scenario.wait_for_warning("RewardModelMissing", fragments, name=name)
        assert_explained(scenario, warning, "kubectl get rewardmodels", name)
    scenario.apply(build_model())
    for name in ("one", "two"):
        scenario.wait_until_healthy(warning, name)


@pytest.mark.each
def test_function_of_a_reward_model_that_raises_on_import(scenario: Scenario) -> None:
    scenario.apply(build_source(BROKEN), build_model(function=FROM_SOURCE))
    scenario.submit(rewards=[build_reward(rewardModelRef={"name": "style"})])
    fragments = ("the corpus of the reward is missing", "spec.function")
    scenario.wait_for_warning("FunctionFailed", fragments, name="style", condition="Ready", kind="RewardModel")
    warning = scenario.wait_for_warning("RewardModelNotReady", ("RewardModel style is not ready (FunctionFailed)",))
    assert_explained(scenario, warning, "kubectl describe rewardmodels")
    scenario.apply(build_source(SOUND))
    scenario.wait_until_healthy(warning)
    assert scenario.condition("Ready", "style", "rewardmodel")["status"] == "True"


def test_helm_test_passes(cluster: Cluster) -> None:
    output = execute(*cluster.helm_command, "test", "rljob", "-n", OPERATOR_NAMESPACE, "--timeout", "5m").decode()
    assert re.search(r"Phase: +Succeeded", output), "helm also succeeds if it runs no test"
