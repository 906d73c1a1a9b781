"""A run's files outside the cluster: through the reader Pod, and in object storage.

The object storage is a server in the tests' process, so the local cluster alone reaches it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import NAMESPACE, ROOT, Cluster, Job

from rljob_api.run.metrics import Metrics, parse_metrics
from rljob_cluster.lifecycle.supervisor import API_ADDRESS
from tests.support.objects import BUCKET, ObjectServer, run_objects

PREFIX = "runs"
NUM_STEPS = 4


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_model_of_an_ended_job_is_copied_by_a_reader_pod(
    cluster: Cluster, submit: Callable[..., Job], tmp_path: Path
) -> None:
    job = submit("parent", schedule={"steps": NUM_STEPS, "promptsPerStep": 4})
    job.wait_for_success()
    print(cluster.rljob("export", job.name, "--to", str(tmp_path / "model")))
    assert {"config.json", "model.safetensors", "README.md"} <= files_of(tmp_path / "model")
    stored = cluster.in_loader("sha256sum", f"/claim/{job.name}/export/model.safetensors").split()[0]
    copied = hashlib.sha256((tmp_path / "model/model.safetensors").read_bytes()).hexdigest()
    assert copied == stored.decode()
    assert "letters" in cluster.rljob("trajectories", job.name)
    names = [pod["metadata"]["name"] for pod in cluster.get("pods")["items"]]
    assert not [name for name in names if name.startswith(f"{job.name}-reader-")]


@pytest.fixture
def objects(cluster: Cluster) -> Iterator[ObjectServer]:
    if not cluster.is_local:
        pytest.skip("Pods of this cluster do not reach a server of the tests")
    with run_objects(API_ADDRESS) as server:
        variables = server.environment()
        secret = {name: variables[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        metadata = {"name": "objects", "namespace": NAMESPACE}
        cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": secret})
        server.put_folder("model", ROOT / ".models/tiny-qwen3")
        yield server


def test_head_whose_disk_is_lost_goes_on_from_the_copy_in_object_storage(
    cluster: Cluster, submit: Callable[..., Job], objects: ObjectServer
) -> None:
    job = submit(
        "copied",
        objectStorage={"endpoint": objects.url, "region": "us-east-1", "secretRef": {"name": "objects"}},
        model={"source": f"s3://{BUCKET}/model"},
        schedule={"steps": 6, "promptsPerStep": 4},
        checkpoint={"everySteps": 2, "persistentVolumeClaim": None, "storage": f"s3://{BUCKET}/{PREFIX}"},
    )
    folder = f"{PREFIX}/{job.name}"

    def read_copy() -> Metrics:
        name = f"{folder}/metrics.jsonl"
        text = objects.read(name).decode() if name in objects.keys(folder) else ""
        return parse_metrics(text.split("\n"))

    job.wait_for("a copy", lambda: f"{folder}/checkpoints/step-000002/COMPLETE" in objects.keys(folder))
    head = cluster.pods(job.name, "head")[0]["metadata"]["name"]
    cluster.kubectl("delete", "pod", "-n", NAMESPACE, head, "--grace-period=0", "--force")
    job.wait_for("Succeeded", lambda: job.condition("Succeeded").get("status") == "True")
    metrics = read_copy()
    assert metrics.last_step == 6
    trained = [prompt for prompts in metrics.prompts_trained for prompt in prompts]
    assert len(trained) == len(set(trained)) == 24, "each prompt was trained on once"
    assert f"{folder}/export/config.json" in objects.keys(folder)
    assert json.loads(objects.read(f"{folder}/owner.json"))["released"]
    log = cluster.kubectl("logs", "-n", NAMESPACE, f"job/{job.name}-head").decode()
    assert "brought back the checkpoint of step" in log
