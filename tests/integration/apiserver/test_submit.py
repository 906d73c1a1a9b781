"""`rljob submit` on a real API server. No operator runs; Pods run where the test's kubelet executes commands."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, watch
from typer.testing import CliRunner, Result

from rljob_cli.main import app
from tests.integration.apiserver.exec_kubelet import ExecKubelet
from tests.support.waiting import DEADLINE_SECONDS

GROUP = ("rljob.dev", "v1alpha1")
MERGE = "application/merge-patch+json"
NODE = "exec-only"
POLL_SECONDS = 0.05
REWARD_MODEL = """\
---
apiVersion: rljob.dev/v1alpha1
kind: RewardModel
metadata: {name: shared}
spec: {function: {file: reward.py}}
"""


class Submitter:
    """A scaffold, and the namespace that it is submitted to."""

    def __init__(self, api: Any, control_plane: Any, namespace: str, folder: Path) -> None:
        self.core, self.jobs, self.namespace = client.CoreV1Api(api), client.CustomObjectsApi(api), namespace
        self.kubeconfig = ["--kubeconfig", str(control_plane.kubeconfig)]
        self.options = ["-n", namespace, *self.kubeconfig]
        CliRunner().invoke(app, ["init", str(folder)])
        self.file = folder / "rljob.yaml"

    def run(self, *arguments: str, exit_code: int = 0, call: bool = False) -> Result:
        options = self.options if call else [*self.options, "--no-call"]
        done = CliRunner().invoke(app, ["submit", str(self.file), *arguments, *options])
        assert done.exit_code == exit_code, f"exit code {done.exit_code}: {done.output} {done.exception}"
        return done

    def get_job(self) -> dict[str, Any]:
        return self.jobs.get_namespaced_custom_object(*GROUP, self.namespace, "rljobs", "sums")

    def config_maps(self) -> list[Any]:
        return [m for m in self.core.list_namespaced_config_map(self.namespace).items if "files" in m.metadata.name]

    def replace(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def add_rows(self) -> Path:
        """Train on a folder that is too large for a ConfigMap."""
        rows = self.file.parent / "rows"
        rows.mkdir()
        for name in ("a", "b"):
            row = {"question": "What is 1 + 1?", "answer": "2", "notes": name * 1_000_001}
            (rows / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        self.replace("./data/train.jsonl", "./rows")
        return rows


@pytest.fixture
def submitter(api_client: Any, control_plane: Any, namespace: str, tmp_path: Path) -> Submitter:
    return Submitter(api_client, control_plane, namespace, tmp_path / "sums")


def test_scaffold_becomes_a_job_and_its_files_a_config_map_that_the_job_owns(submitter: Submitter) -> None:
    output = submitter.run().stdout
    job, [files] = submitter.get_job(), submitter.config_maps()
    assert f"RLJob {submitter.namespace}/sums applied" in output
    assert f"next: kubectl rljob top sums -n {submitter.namespace}" in output
    assert [(o.kind, o.name, o.uid) for o in files.metadata.owner_references] == [
        ("RLJob", "sums", job["metadata"]["uid"])
    ]
    reference = job["spec"]["rewards"][0]["function"]["configMapKeyRef"]
    assert reference["name"] == files.metadata.name
    assert files.data[reference["key"]] == (submitter.file.parent / "reward.py").read_text()
    assert job["spec"]["data"]["train"]["source"] == "/mnt/files/train/train.jsonl"


def test_job_beyond_the_policy_of_the_namespace_leaves_nothing(submitter: Submitter) -> None:
    policy: dict[str, Any] = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJobPolicy",
        "metadata": {"name": "default"},
    }
    policy["spec"] = {"limits": {"queues": ["research"]}}
    submitter.jobs.create_namespaced_custom_object(*GROUP, submitter.namespace, "rljobpolicies", policy)
    output = submitter.run(exit_code=2).output
    assert "spec.scheduling.queue must be one of research, got none (spec.limits.queues of RLJobPolicy" in output
    assert submitter.config_maps() == []
    policy = {"spec": {"defaults": {"queue": "research"}}}
    submitter.jobs.patch_namespaced_custom_object(*GROUP, submitter.namespace, "rljobpolicies", "default", policy)
    submitter.run()
    assert "scheduling" not in submitter.get_job()["spec"], "the operator applies the default"


def test_job_that_starts_from_another_needs_it(submitter: Submitter) -> None:
    start = ("--set", "spec.model.source=job://first@last")
    output = " ".join(submitter.run(*start, exit_code=2).output.split())
    assert f"job://first@last needs RLJob first, which does not exist in the namespace {submitter.namespace}" in output
    spec = {
        "model": {"source": "hf://a/b"},
        "data": {"train": {"source": "hf://a/b"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
        "checkpoint": {"persistentVolumeClaim": {"claimName": "runs"}},
    }
    first = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "first"}, "spec": spec}
    submitter.jobs.create_namespaced_custom_object(*GROUP, submitter.namespace, "rljobs", first)
    assert "waits: RLJob first exports its model at its end" in submitter.run(*start).output
    assert submitter.get_job()["spec"]["model"]["source"] == "job://first@last"


def test_namespace_of_the_file_is_used_unless_the_command_names_one(submitter: Submitter) -> None:
    submitter.replace("  name: sums", f"  name: sums\n  namespace: {submitter.namespace}")
    arguments = ["submit", str(submitter.file), "--no-call", *submitter.kubeconfig]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert submitter.get_job()["spec"]["schedule"]["steps"] == 20
    done = CliRunner().invoke(app, [*arguments, "-n", "other"])
    assert (done.exit_code, f"pass -n {submitter.namespace}" in done.stderr) == (2, True)


def test_objects_as_applied_are_all_that_stdout_has_with_yaml(submitter: Submitter) -> None:
    config_map, job = yaml.safe_load_all(submitter.run("-o", "yaml").stdout)
    assert (config_map["kind"], config_map["metadata"]["ownerReferences"][0]["uid"]) == (
        "ConfigMap",
        job["metadata"]["uid"],
    )


def test_second_submission_changes_nothing_until_a_file_changes(submitter: Submitter) -> None:
    submitter.run()
    first = submitter.get_job()["metadata"]["generation"]
    result = json.loads(submitter.run("-o", "json").stdout)
    assert (submitter.get_job()["metadata"]["generation"], len(submitter.config_maps())) == (first, 1)
    assert [m["kind"] for m in result["objects"]] == ["ConfigMap", "RLJob"]
    assert (result["name"], result["copied_bytes"]) == ("sums", 0)
    (submitter.file.parent / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth): return 1\n"
    )
    submitter.run()
    assert submitter.get_job()["metadata"]["generation"] == first + 1
    assert len(submitter.config_maps()) == 2, "running Pods may still read the first"


def test_reward_model_of_the_file_owns_the_files_too(submitter: Submitter) -> None:
    submitter.file.write_text(submitter.file.read_text() + REWARD_MODEL)
    submitter.run()
    [files] = submitter.config_maps()
    assert [o.kind for o in files.metadata.owner_references] == ["RLJob", "RewardModel"]
    assert "shared.reward.py" in files.data


def test_job_whose_reward_raises_leaves_nothing(submitter: Submitter) -> None:
    reward = submitter.file.parent / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth): raise ValueError('no')\n")
    assert "ValueError: no" in submitter.run(exit_code=2, call=True).stderr
    assert submitter.config_maps() == []


def test_job_that_the_api_server_refuses_leaves_nothing_new(submitter: Submitter) -> None:
    submitter.run()
    submitter.replace("SmolLM2-135M-Instruct", "SmolLM2-360M-Instruct")
    submitter.replace("steps: 20", "steps: 30")
    (submitter.file.parent / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth): return 1\n"
    )
    assert "spec.model" in submitter.run(exit_code=1).stderr
    assert (submitter.get_job()["spec"]["schedule"]["steps"], len(submitter.config_maps())) == (20, 1)


@pytest.mark.parametrize("option", ["--wait", "--follow"])
def test_command_returns_the_end_of_the_job_and_ignores_that_of_an_earlier_one(
    submitter: Submitter, option: str
) -> None:
    submitter.run()
    set_phase(submitter, "Succeeded", generation=1)
    submitter.replace("steps: 20", "steps: 30")
    ended = threading.Timer(
        0, lambda: wait_for_generation(submitter, 2) and set_phase(submitter, "Failed", generation=2)
    )
    ended.start()
    assert f"next: kubectl rljob top sums -n {submitter.namespace}" in submitter.run(option, exit_code=1).stdout
    result = json.loads(submitter.run("--wait", "-o", "json", exit_code=1).stdout)
    assert (result["name"], result["phase"]) == ("sums", "Failed")


def set_phase(submitter: Submitter, phase: str, generation: int) -> None:
    status = {"phase": phase, "observedGeneration": generation}
    submitter.jobs.patch_namespaced_custom_object_status(
        *GROUP, submitter.namespace, "rljobs", "sums", {"status": status}, _content_type=MERGE
    )


def wait_for_generation(submitter: Submitter, generation: int) -> bool:
    arguments = (*GROUP, submitter.namespace, "rljobs")
    stream = watch.Watch().stream(
        submitter.jobs.list_namespaced_custom_object, *arguments, timeout_seconds=DEADLINE_SECONDS
    )
    return any(event["object"]["metadata"]["generation"] == generation for event in stream)


@pytest.fixture
def kubelet(submitter: Submitter, control_plane: Any, tmp_path: Path) -> Iterator[ExecKubelet]:
    """A node on which the Pods that copy files run."""
    claim = tmp_path / "claim"
    claim.mkdir()
    with ExecKubelet(tmp_path, control_plane.address, claim) as running:
        submitter.core.create_node({"metadata": {"name": NODE}})
        addresses = [{"type": "InternalIP", "address": running.address}]
        status = {"addresses": addresses, "daemonEndpoints": {"kubeletEndpoint": {"Port": running.port}}}
        submitter.core.patch_node_status(NODE, {"status": status}, _content_type=MERGE)
        stop = threading.Event()
        scheduler = threading.Thread(target=run_pods, args=(submitter, stop))
        scheduler.start()
        yield running
        stop.set()
        scheduler.join()
        submitter.core.delete_node(NODE)


def run_pods(submitter: Submitter, stop: threading.Event) -> None:
    """Schedule each new Pod and report it as ready."""
    core, namespace = submitter.core, submitter.namespace
    while not stop.wait(POLL_SECONDS):
        for pod in core.list_namespaced_pod(namespace, field_selector="spec.nodeName=").items:
            name, target = pod.metadata.name, {"apiVersion": "v1", "kind": "Node", "name": NODE}
            binding = {"metadata": {"name": name}, "target": target}
            core.create_namespaced_binding(namespace, binding, _preload_content=False)
            ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            core.patch_namespaced_pod_status(name, namespace, {"status": ready}, _content_type=MERGE)


def test_large_data_is_copied_once_to_a_new_claim_that_the_job_owns(submitter: Submitter, kubelet: ExecKubelet) -> None:
    rows = submitter.add_rows()
    result = json.loads(submitter.run("-o", "json", "--storage-class", "fast").stdout)
    claim, path = submitter.get_job()["spec"]["data"]["train"]["source"].removeprefix("pvc://").split("/", 1)
    copied = kubelet.claim / path
    assert claim == "sums-files"
    assert {file.name: file.read_bytes() for file in copied.iterdir()} == {
        f.name: f.read_bytes() for f in rows.iterdir()
    }
    assert result["copied_bytes"] == sum(file.stat().st_size for file in rows.iterdir())
    stored = submitter.core.read_namespaced_persistent_volume_claim("sums-files", submitter.namespace)
    assert (stored.spec.storage_class_name, stored.spec.resources.requests) == ("fast", {"storage": "1Gi"})
    assert [owner.kind for owner in stored.metadata.owner_references] == ["RLJob"]
    assert submitter.core.list_namespaced_pod(submitter.namespace).items == [], "the Pod that copies is deleted"

    again = submitter.run("--storage-class", "other").stdout
    assert "./rows is already on the claim" in again
    assert [command[0] for command in kubelet.commands] == ["test", "sh", "test"]


def test_copy_that_fails_reports_what_the_command_printed(submitter: Submitter, kubelet: ExecKubelet) -> None:
    submitter.add_rows()
    (kubelet.claim / "sums").write_text("in the way")
    output = submitter.run(exit_code=1).stderr
    assert "./rows: copying failed: mkdir: cannot create directory" in output
    assert submitter.core.list_namespaced_pod(submitter.namespace).items == []


def test_folder_of_a_runners_command_goes_along_without_hidden_files(submitter: Submitter) -> None:
    folder = submitter.file.parent / "app"
    folder.mkdir()
    (folder / "agent.py").write_text("print(1.0)\n")
    (folder / ".env").write_text("KEY=secret\n")
    manifest = yaml.safe_load(submitter.file.read_text())
    runner = {"command": ["python", "agent.py"], "workingDir": "./app"}
    manifest["spec"] |= {"rewards": [], "agent": {"type": "program", "runner": runner}}
    manifest["spec"]["data"]["format"] = "chat"
    manifest["spec"].pop("evaluation", None)
    submitter.file.write_text(yaml.safe_dump(manifest))
    submitter.run()
    job, [files] = submitter.get_job(), submitter.config_maps()
    assert job["spec"]["agent"]["runner"]["workingDir"] == "/mnt/files/runner"
    assert files.data["runner.agent.py"] == "print(1.0)\n"
    assert "secret" not in str(files.data)
