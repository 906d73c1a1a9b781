"""The README's smallest job on a cluster: model and data come from a Hub that needs a token, which a Secret has.

Changed are only the nodes, the size, and the Hub: a Pod that serves the tiny model by the name of the real one.
"""

from __future__ import annotations

import copy
import io
import json
import tarfile
from pathlib import Path

import pytest
import yaml
from harness import CLAIM, NAMESPACE, ROOT, Cluster, Job, Manifest, wait_for

from tests.support.readme import read_smallest_job

SMALLEST_JOB: Manifest = yaml.safe_load(read_smallest_job())
MODEL = SMALLEST_JOB["spec"]["model"]["source"].removeprefix("hf://")
CARD = "---\nconfigs: [{config_name: main, data_files: [{split: train, path: main/*}]}]\n---\n"
ACCESS = {f"models/{MODEL}": {"token": "hf_right", "gated": True}}
NUM_ROWS = 200


@pytest.fixture(scope="module")
def hub(cluster: Cluster) -> Manifest:
    """Start the Hub. Return spec.hub with the token."""
    cluster.unpack_on_claim(_pack_repositories())
    manifest = (ROOT / "e2e" / "hub.yaml").read_text().replace("rljob-e2e", CLAIM)
    cluster.kubectl("delete", "pod", "-n", NAMESPACE, "hub", "--ignore-not-found", "--wait")
    cluster.kubectl("apply", "-n", NAMESPACE, "--server-side", "-f", "-", input=manifest.encode())
    cluster.kubectl("wait", "-n", NAMESPACE, "pod/hub", "--for=condition=Ready", "--timeout=180s")
    return {"endpoint": "http://hub:8000", "tokenSecretRef": {"name": "hub", "key": "token"}}


def _pack_repositories() -> bytes:
    archive = io.BytesIO()
    rows = (ROOT / "examples/gsm8k/data/train.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_ROWS]
    repositories = Path("hub/repositories")
    texts = {
        repositories / "access.json": json.dumps(ACCESS),
        repositories / "datasets/openai/gsm8k/README.md": CARD,
        repositories / "datasets/openai/gsm8k/main/train.jsonl": "".join(f"{row}\n" for row in rows),
    }
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(ROOT / "tests/support/hub.py", "hub/hub.py")
        tar.add(ROOT / ".models/tiny-qwen3", str(repositories / "models" / MODEL))
        for path, text in texts.items():
            entry = tarfile.TarInfo(str(path))
            entry.size, entry.mode = len(text.encode()), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return archive.getvalue()


def build_job(name: str, hub: Manifest) -> Manifest:
    """Return the smallest job with one CPU replica per role, on this cluster's nodes, for one step."""
    job = copy.deepcopy(SMALLEST_JOB)
    spec = job["spec"]
    pools = {
        role: {
            "nodeSelector": {"rljob.dev/pool": role},
            "tolerations": [{"key": "rljob.dev/pool", "value": role, "effect": "NoSchedule"}],
        }
        for role in ("trainer", "rollout", "reward")
    }
    spec["hub"] = hub
    spec["head"] = {"nodePool": pools["trainer"]}
    spec["trainer"] |= {"gpusPerReplica": 0, "nodePool": pools["trainer"]}
    small = {"maxModelLen": 512, "kvCacheMemory": "1Gi", "sampling": {"maxTokens": 16}}
    spec["rollout"] |= {"replicas": 1, "gpusPerReplica": 0, "nodePool": pools["rollout"], **small}
    for reward in spec["rewards"]:
        reward["nodePool"] = pools["reward"]
    spec["algorithm"] = {"groupSize": 2}
    spec["schedule"] = {"steps": 1, "promptsPerStep": 2}
    spec["checkpoint"] = {"persistentVolumeClaim": {"claimName": CLAIM}}
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    return job


def test_smallest_job_of_the_readme_trains_with_a_gated_model(cluster: Cluster, hub: Manifest) -> None:
    job = Job(cluster, build_job("smallest", hub))
    summary = job.wait_for_success()
    assert summary.samples_trained == 4
    assert len(set(summary.weight_digests.values())) == 1


def test_gated_model_without_a_token_fails_the_job_with_the_fix(cluster: Cluster, hub: Manifest) -> None:
    job = Job(cluster, build_job("gated", {"endpoint": hub["endpoint"]}))
    wait_for("the job to fail", lambda: job.condition("Failed").get("status") == "True", 300)
    failed = job.condition("Failed")
    assert failed["reason"] == "UserError"
    assert f"spec.model.source: hf://{MODEL} is gated: accept its terms" in failed["message"]
    assert "set spec.hub.tokenSecretRef" in failed["message"]
