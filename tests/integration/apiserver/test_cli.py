"""The CLI's commands for jobs on a cluster, on a real API server.

No operator runs: the test writes statuses as the operator and the kubelets do. Logs come from a fake kubelet.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from kubernetes import client
from typer.testing import CliRunner

from rljob_cli.main import app
from rljob_core.plan import lost_nodes
from tests.integration.apiserver.fake_kubelet import FakeKubelet
from tests.integration.apiserver.manifests import put_all, smallest
from tests.support.waiting import DEADLINE_SECONDS

NOW = "2026-01-01T00:00:00Z"
NODE = "logs-only"
GROUP = ("rljob.dev", "v1alpha1")
MERGE = "application/merge-patch+json"


class CliHarness:
    """One namespace: creates jobs and Pods, sets their statuses, and runs commands."""

    def __init__(self, api: Any, control_plane: Any, namespace: str) -> None:
        self.namespace, self.control_plane = namespace, control_plane
        self.core, self.jobs = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.options = ["-n", namespace, "--kubeconfig", str(control_plane.kubeconfig)]

    def make_job(self, name: str = "sums", **changes: Any) -> dict[str, Any]:
        body = put_all(smallest(name=name), changes)
        return self.jobs.create_namespaced_custom_object(*GROUP, self.namespace, "rljobs", body)

    def get_job(self, name: str = "sums") -> dict[str, Any]:
        return self.jobs.get_namespaced_custom_object(*GROUP, self.namespace, "rljobs", name)

    def set_phase(self, phase: str, reason: str, message: str, name: str = "sums", **status: Any) -> None:
        """Set the condition that determines the phase, and the given rest of the status."""
        type_ = phase if phase != "Pending" else "Running"
        condition = {"type": type_, "status": "True" if type_ == phase else "False", "reason": reason}
        condition |= {"message": message, "lastTransitionTime": NOW, "observedGeneration": 1}
        status = {"phase": phase, "observedGeneration": 1, "conditions": [condition], **status}
        self.jobs.patch_namespaced_custom_object_status(
            *GROUP, self.namespace, "rljobs", name, {"status": status}, _content_type=MERGE
        )

    def make_pod(self, name: str, role: str, reward: str | None = None, node: str | None = None) -> None:
        labels = {"rljob.dev/job": "sums", "rljob.dev/role": role} | ({"rljob.dev/reward": reward} if reward else {})
        spec = {"containers": [{"name": role, "image": "none.invalid/none"}]} | ({"nodeName": node} if node else {})
        self.core.create_namespaced_pod(self.namespace, {"metadata": {"name": name, "labels": labels}, "spec": spec})

    def set_pod(self, name: str, *, ready: bool = False, restarts: int = 0, scheduled: str = "", **state: Any) -> None:
        pod = self.core.read_namespaced_pod(name, self.namespace)
        container = pod.spec.containers[0].name
        conditions = [{"type": "Ready", "status": str(ready)}]
        if scheduled:
            conditions = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": scheduled},
            ]
        container_status = {"name": container, "image": "i", "imageID": "", "ready": ready, "restartCount": restarts}
        statuses = [] if scheduled else [container_status | state]
        body = {"status": {"phase": "Pending" if scheduled else "Running", "conditions": conditions}}
        body["status"]["containerStatuses"] = statuses
        self.core.patch_namespaced_pod_status(name, self.namespace, body, _content_type=MERGE)

    def warn(self, kind: str, name: str, reason: str, message: str, at: str | None = None, count: int = 1) -> None:
        at = at or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = {
            "metadata": {"generateName": "warning-"},
            "involvedObject": {"kind": kind, "name": name, "namespace": self.namespace},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": at,
            "count": count,
        }
        self.core.create_namespaced_event(self.namespace, body)

    def run(self, *arguments: str, exit_code: int = 0, kubeconfig: str | None = None) -> str:
        """Run a command; return its stdout followed by its stderr."""
        options = [*self.options[:2], "--kubeconfig", kubeconfig] if kubeconfig else self.options
        result = CliRunner().invoke(app, [*arguments, *options])
        output = result.stdout + result.stderr
        assert result.exit_code == exit_code, f"exit code {result.exit_code}: {output} {result.exception}"
        return output


@pytest.fixture
def harness(api_client: Any, control_plane: Any, namespace: str) -> CliHarness:
    return CliHarness(api_client, control_plane, namespace)


@pytest.fixture
def kubelet(api_client: Any, control_plane: Any, tmp_path: Any) -> Iterator[FakeKubelet]:
    core = client.CoreV1Api(api_client)
    with FakeKubelet(tmp_path, control_plane.address) as running:
        core.create_node({"metadata": {"name": NODE}})
        status = {
            "addresses": [{"type": "InternalIP", "address": running.address}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": running.port}},
        }
        core.patch_node_status(NODE, {"status": status}, _content_type=MERGE)
        yield running
        core.delete_node(NODE)


def test_suspend_and_resume_change_the_stored_job(harness: CliHarness) -> None:
    harness.make_job()
    assert "its checkpoints with them" in harness.run("suspend", "sums"), "it has no claim"
    assert harness.get_job()["spec"]["suspend"] is True
    assert json.loads(harness.run("suspend", "sums", "-o", "json"))["changed"] is False
    output = json.loads(harness.run("resume", "sums", "--output", "json"))
    assert (output["command"], output["name"], output["namespace"], output["changed"]) == (
        "resume",
        "sums",
        harness.namespace,
        True,
    )
    assert harness.get_job()["spec"]["suspend"] is False


def test_retry_annotates_only_a_failed_job(harness: CliHarness) -> None:
    harness.make_job()
    assert "only a failed job can be retried" in harness.run("resume", "--retry", "sums", exit_code=2)
    harness.set_phase("Failed", "HeadFailed", "head ended with exit code 75")
    assert "will be retried from step 0: no claim and no storage has its checkpoints" in harness.run(
        "resume", "--retry", "sums"
    )
    assert harness.get_job()["metadata"]["annotations"]["rljob.dev/retry"]


def test_restart_annotates_the_job_for_its_roles(harness: CliHarness) -> None:
    harness.make_job()
    assert "has no role rollouts" in harness.run("restart", "sums", "--role", "rollouts", exit_code=2)
    output = json.loads(harness.run("restart", "sums", "--role", "rollout", "--role", "head", "-o", "json"))
    assert (output["command"], output["changed"]) == ("restart", True)
    annotations = harness.get_job()["metadata"]["annotations"]
    assert set(annotations) >= {"rljob.dev/restart-rollout", "rljob.dev/restart-head"}


@pytest.mark.parametrize("verb", ["resume", "suspend", "restart"])
def test_control_of_an_invalid_job_asks_for_a_changed_spec(harness: CliHarness, verb: str) -> None:
    harness.make_job()
    harness.set_phase("Failed", "InvalidSpec", "spec.rewards[0] cannot be")
    output = harness.run(verb, "sums", exit_code=2)
    assert "the spec is invalid" in output
    assert f"kubectl edit rljob sums -n {harness.namespace}" in output


def test_misspelled_name_is_corrected(harness: CliHarness) -> None:
    harness.make_job()
    assert "did you mean sums?" in harness.run("explain", "sumz", exit_code=2)


def test_missing_permission_is_reported(harness: CliHarness) -> None:
    harness.make_job()
    unprivileged = str(harness.control_plane.kubeconfig_for("unprivileged"))
    assert "forbidden: you may not get rljobs" in harness.run("explain", "sums", exit_code=1, kubeconfig=unprivileged)


def test_explain_reports_a_job_without_operator(harness: CliHarness) -> None:
    harness.make_job()
    output = harness.run("explain", "sums")
    assert "not reconciled yet" in output
    assert "kubectl get pods -A -l app.kubernetes.io/name=rljob-operator" in output


def test_explain_reports_pod_problem_remedy_and_next_command(harness: CliHarness) -> None:
    harness.make_job(**{"checkpoint.persistentVolumeClaim.claimName": "runs"})
    harness.set_phase("Pending", "Unschedulable", "waits for 1 of 1 rollout Pod")
    for name, role, reward in (
        ("sums-head-a", "head", None),
        ("sums-trainer-0", "trainer", None),
        ("sums-rollout-b", "rollout", None),
        ("sums-reward-correct-c", "reward", "correct"),
    ):
        harness.make_pod(name, role, reward)
    harness.set_pod("sums-head-a", ready=True, state={"running": {"startedAt": NOW}})
    harness.set_pod("sums-rollout-b", scheduled="0/3 nodes are available: 3 Insufficient cpu.")
    ended = {"exitCode": 1, "reason": "Error", "message": "error: no such port", "finishedAt": NOW}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    harness.set_pod("sums-reward-correct-c", restarts=3, state=waiting, lastState={"terminated": ended})
    harness.warn("Pod", "sums-rollout-b", "FailedScheduling", "0/3 nodes are available", count=4)
    harness.warn("Pod", "other-rollout-b", "FailedScheduling", "of another job")
    harness.warn("Pod", "sums-rollout-z", "FailedMount", "of an earlier job of this name", at="2020-01-01T00:00:00Z")
    output = " ".join(harness.run("explain", "sums").split())
    assert "sums-rollout-b: Unschedulable: 0/3 nodes are available: 3 Insufficient cpu." in output
    assert "sums-reward-correct-c: CrashLoopBackOff: ended with exit code 1: no such port" in output
    assert "compare spec.rollout.nodePool" in output
    assert "FailedScheduling (x4)" in output
    assert "of another job" not in output
    assert "of an earlier job" not in output
    commands = output.partition(" Next ")[2]
    assert commands.startswith("kubectl get nodes --show-labels"), commands
    assert commands.endswith(f"kubectl rljob logs sums -n {harness.namespace} --role reward-correct --previous")
    found = json.loads(harness.run("explain", "sums", "-o", "json"))
    assert [(r["name"], r["ready"], r["desired"]) for r in found["roles"]][:2] == [("head", 1, 1), ("trainer", 0, 1)]


def test_explain_names_the_lost_node_of_a_pod_that_no_kubelet_ends(
    harness: CliHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_nodes, "_LOST_MARGIN", timedelta(hours=-1))
    harness.make_job()
    harness.set_phase("Restarting", "TrainerRestarting", "waits for 1 of 1 trainer Pod")
    harness.make_pod("sums-trainer-0", "trainer", node="lost-one")
    conditions = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    status = {"status": {"phase": "Running", "conditions": conditions}}
    harness.core.patch_namespaced_pod_status("sums-trainer-0", harness.namespace, status, _content_type=MERGE)
    output = " ".join(harness.run("explain", "sums").split())
    assert "node lost-one of Pod sums-trainer-0 is not ready or does not answer" in output
    harness.core.delete_namespaced_pod("sums-trainer-0", harness.namespace)
    output = " ".join(harness.run("explain", "sums").split())
    assert "Pod sums-trainer-0 is stuck in Terminating on node lost-one, which does not answer" in output
    found = json.loads(harness.run("explain", "sums", "-o", "json"))
    assert found["next"][:2] == [
        "kubectl describe node lost-one",
        "kubectl taint nodes lost-one node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
    ]


def test_explain_of_a_failed_job_suggests_logs_and_retry(harness: CliHarness) -> None:
    harness.make_job()
    harness.set_phase("Failed", "HeadFailed", "head ended with exit code 75: lost a trainer")
    harness.make_pod("sums-head-a", "head")
    harness.set_pod("sums-head-a", state={"terminated": {"exitCode": 75, "message": "error: lost", "finishedAt": NOW}})
    output = harness.run("explain", "sums")
    assert "HeadFailed: head ended with exit code 75: lost a trainer" in output
    assert f"kubectl rljob logs sums -n {harness.namespace} --role head" in output
    assert f"kubectl rljob resume --retry sums -n {harness.namespace}" in output


def test_explain_lists_what_the_user_may_not_read(harness: CliHarness, api_client: Any) -> None:
    harness.make_job()
    user = f"reader-of-{harness.namespace}"
    rbac = client.RbacAuthorizationV1Api(api_client)
    rules = [{"apiGroups": ["rljob.dev"], "resources": ["rljobs"], "verbs": ["get"]}]
    rbac.create_namespaced_role(harness.namespace, {"metadata": {"name": "reader"}, "rules": rules})
    binding = {
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }
    rbac.create_namespaced_role_binding(harness.namespace, binding)
    kubeconfig = str(harness.control_plane.kubeconfig_for(user))
    deadline = time.monotonic() + DEADLINE_SECONDS
    while CliRunner().invoke(app, ["explain", "sums", *harness.options[:2], "--kubeconfig", kubeconfig]).exit_code:
        assert time.monotonic() < deadline, "the role never took effect"
    output = harness.run("explain", "sums", kubeconfig=kubeconfig)
    assert "Not readable" in output
    assert "you may not list pods" in output


def test_top_lists_jobs_with_phase_and_wait(harness: CliHarness) -> None:
    assert "no RLJobs in namespace" in harness.run("top")
    harness.make_job("one")
    harness.make_job("two")
    progress = {"step": 3, "totalSteps": 10, "reward": 0.5, "phase": "score", "waitsFor": "12 rewards"}
    counts = {"rollouts": "2/2", "rewards": "1/2", "progress": progress}
    harness.set_phase("Running", "Running", "all Pods are ready", name="one", **counts)
    header, one, two = harness.run("top").splitlines()
    columns = "NAME PHASE STEP LAST STEP REWARD ROLLOUTS REWARDS DRIVER STALENESS AGE WAITS FOR"
    assert header.split() == columns.split()
    cells = one.split()
    assert cells[:9] == ["one", "Running", "3/10", "-", "0.500", "2/2", "1/2", "score", "-"]
    assert cells[10:] == ["12", "rewards"]
    assert "not reconciled yet; is the operator running?" in two
    rows = json.loads(harness.run("top", "-A", "-o", "json"))
    assert {"one", "two"} <= {row["name"] for row in rows if row["namespace"] == harness.namespace}
    assert harness.run("top", "-A").startswith("NAMESPACE")


def test_top_of_a_job_shows_its_roles_and_pods(harness: CliHarness) -> None:
    harness.make_job()
    roles = [{"name": "rollout", "desired": 2, "ready": 1, "restarts": 4}]
    harness.set_phase("Running", "Running", "", roles=roles)
    harness.make_pod("sums-rollout-a", "rollout", node="gpu-7")
    harness.set_pod("sums-rollout-a", ready=True, restarts=4, state={"running": {"startedAt": NOW}})
    output = harness.run("top", "sums")
    assert ["rollout", "1/2", "4"] in [line.split() for line in output.splitlines()]
    pod = output.splitlines()[-1].split()
    assert pod[:4] == ["sums-rollout-a", "rollout", "gpu-7", "4"]
    assert pod[-1] == "Ready"
    view = json.loads(harness.run("top", "sums", "-o", "json"))
    assert view["pods"][0]["cpu_cores"] is None, "no metrics.k8s.io answers here"


def test_logs_are_merged_by_time_with_pod_names(harness: CliHarness, kubelet: FakeKubelet) -> None:
    harness.make_job()
    for name, role, reward in (("sums-head-a", "head", None), ("sums-reward-correct-b", "reward", "correct")):
        harness.make_pod(name, role, reward, NODE)
    harness.make_pod("sums-rollout-c", "rollout")  # it has no node, so no log
    kubelet.write("sums-head-a", "head", "first", 1)
    kubelet.write("sums-reward-correct-b", "reward", "second", 2)
    kubelet.write("sums-head-a", "head", "third", 3)
    lines = harness.run("logs", "sums").splitlines()
    texts = [line.split()[-1] for line in lines if line.startswith("sums-") and ": " not in line]
    assert texts == ["first", "second", "third"]
    assert any(line.startswith("sums-rollout-c: has no log: waiting to be scheduled") for line in lines), (
        "a Pod without a log is reported, not hidden"
    )
    assert harness.run("logs", "sums", "--role", "reward-correct").split() == ["sums-reward-correct-b", "second"]
    assert harness.run("logs", "sums", "--role", "head", "--tail", "1").split() == ["sums-head-a", "third"]
    assert "must be one of head, trainer" in harness.run("logs", "sums", "--role", "heads", exit_code=2)


def test_previous_logs_are_those_before_the_restart(harness: CliHarness, kubelet: FakeKubelet) -> None:
    harness.make_job()
    harness.make_pod("sums-head-a", "head", node=NODE)
    ended = {"terminated": {"exitCode": 1, "finishedAt": NOW, "containerID": "containerd://1"}}
    harness.set_pod("sums-head-a", restarts=1, state={"running": {"startedAt": NOW}}, lastState=ended)
    kubelet.write("sums-head-a", "head", "died", 1)
    kubelet.restart("sums-head-a", "head")
    kubelet.write("sums-head-a", "head", "lives", 2)
    assert harness.run("logs", "sums", "--previous").split() == ["sums-head-a", "died"]


def test_followed_logs_include_restarted_containers_and_new_pods_until_the_end(
    harness: CliHarness, kubelet: FakeKubelet
) -> None:
    harness.make_job()
    harness.make_pod("sums-rollout-a", "rollout", node=NODE)
    harness.set_pod("sums-rollout-a", ready=True, state={"running": {"startedAt": NOW}})
    kubelet.write("sums-rollout-a", "rollout", "one", 1)
    command = [sys.executable, "-m", "rljob_cli.main", "logs", "sums", "-f", *harness.options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    expect = _expecter(process)
    try:
        expect("sums-rollout-a one")
        kubelet.write("sums-rollout-a", "rollout", "two", 2)
        expect("sums-rollout-a two")
        kubelet.restart("sums-rollout-a", "rollout")
        harness.set_pod("sums-rollout-a", ready=True, restarts=1, state={"running": {"startedAt": NOW}})
        kubelet.write("sums-rollout-a", "rollout", "three", 3)
        expect("sums-rollout-a three")
        harness.make_pod("sums-rollout-b", "rollout", node=NODE)
        kubelet.write("sums-rollout-b", "rollout", "four", 4)
        expect("sums-rollout-b four")
        harness.core.delete_namespaced_pod("sums-rollout-a", harness.namespace, grace_period_seconds=0)
        for pod in ("sums-rollout-a", "sums-rollout-b"):
            kubelet.end(pod, "rollout")
        done = {"terminated": {"exitCode": 0, "finishedAt": NOW}}
        harness.set_pod("sums-rollout-b", state=done)
        harness.set_phase("Succeeded", "JobSucceeded", "the driver has finished all steps")
        assert process.wait(DEADLINE_SECONDS) == 0, "the job has ended, and so do its logs"
    finally:
        process.kill()
        process.wait()


def _expecter(process: subprocess.Popen[str]) -> Callable[[str], None]:
    """Waits for one line more, and fails when it is another: nothing is printed twice."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.strip())

    threading.Thread(target=read, daemon=True).start()

    def expect(text: str) -> None:
        got = lines.get(timeout=DEADLINE_SECONDS)
        assert got == text

    return expect
