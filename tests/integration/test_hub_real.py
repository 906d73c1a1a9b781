"""The jobs that newcomers are shown, as they stand, against a Hub: a local one with the tiny model behind their names.

Only --set changes them: no GPUs, and small steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import prepare
from rljob_api.run.summaries import read_driver_summary
from tests.paths import EXAMPLES
from tests.support.hub import LocalHub, run_hub
from tests.support.readme import read_smallest_job

pytestmark = pytest.mark.real

RLJOB = Path(sys.executable).with_name("rljob")
SMALL = {
    "trainer.gpusPerReplica": 0,
    "rollout.gpusPerReplica": 0,
    "rollout.replicas": 1,
    "rollout.maxModelLen": 256,
    "rollout.sampling.maxTokens": 16,
    "rollout.kvCacheMemory": "512Mi",
    "algorithm.groupSize": 2,
    "schedule.steps": 1,
    "schedule.promptsPerStep": 2,
}
GSM8K_CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train.jsonl}]
---
"""


@pytest.fixture
def hub(tmp_path):
    with run_hub(tmp_path / "hub") as running:
        yield running


def add_gsm8k(hub: LocalHub) -> None:
    folder = hub.add("datasets/openai/gsm8k")
    (folder / "README.md").write_text(GSM8K_CARD)
    rows = (EXAMPLES / "gsm8k" / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:50]
    for subset in ("main", "socratic"):
        (folder / subset).mkdir()
        (folder / subset / "train.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def run(job: Path, settings: dict[str, object], **environment: str) -> Path:
    """Run a job to its end in a separate home. Return the run's folder."""
    home = job.parent / "home"
    shell = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    options = [part for name, value in settings.items() for part in ("--set", f"spec.{name}={value}")]
    command = [RLJOB, "run", job.name, "--output", "plain", *options]
    done = subprocess.run(
        command,
        cwd=job.parent,
        env={**shell, "HF_HOME": str(home), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "prompts, in tokens: min " in done.stdout, "the lengths are shown before the start"
    (folder,) = (path.parent for path in job.parent.glob("runs/*/driver-summary.json"))
    return folder


def test_smallest_job_of_the_readme_runs_against_a_hub(hub, tmp_path):
    hub.add("models/Qwen/Qwen2.5-0.5B-Instruct", prepare.MODELS / "tiny-qwen3")
    add_gsm8k(hub)
    job = tmp_path / "gsm8k.yaml"
    job.write_text(read_smallest_job(), encoding="utf-8")
    folder = run(job, SMALL, HF_ENDPOINT=hub.url)
    assert read_driver_summary(folder).samples_trained == 4
    assert (folder / "export" / "config.json").exists()
    assert any(request.endswith("main/train.jsonl") for request in hub.requests)
    assert not any("socratic/train.jsonl" in request for request in hub.requests), "only the subset is read"


@pytest.mark.slow
def test_scaffold_runs_against_a_private_repository_with_revision_and_token(hub, tmp_path):
    name = "models/HuggingFaceTB/SmolLM2-135M-Instruct"
    hub.add(name, token="hf_right", gated=True)
    hub.add(f"{name}@v1", prepare.MODELS / "tiny-qwen3")
    subprocess.run([RLJOB, "init", "myjob", "--gpus", "0"], cwd=tmp_path, check=True, capture_output=True)
    settings = SMALL | {
        "model.revision": "v1",
        "hub.endpoint": hub.url,
        "hub.tokenSecretRef.name": "hub",
        "hub.tokenSecretRef.key": "MY_HUB_TOKEN",
        "data.eval.limit": 4,
    }
    folder = run(tmp_path / "myjob" / "rljob.yaml", settings, MY_HUB_TOKEN="hf_right")
    assert read_driver_summary(folder).samples_trained == 4
