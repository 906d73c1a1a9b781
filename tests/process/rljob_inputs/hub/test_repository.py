"""What the Hub refuses ends `rljob run` before anything starts: exit code 2, one line per source, with the field."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub import run_hub
from tests.support.model_folder import write_model

RLJOB = Path(sys.executable).with_name("rljob")
JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: hub}
spec:
  model: {source: "hf://org/model"}
  data: {train: {source: "hf://org/data"}}
  rewards: [{name: r, function: {inline: "def compute_score(data_source, solution_str, ground_truth): return 1.0"}}]
"""


@pytest.fixture
def hub(tmp_path):
    with run_hub(tmp_path / "hub") as running:
        write_model(running.add("models/org/model", token="hf_right", gated=True), {"max_position_embeddings": 2048})
        (running.add("datasets/org/data") / "train.jsonl").write_text('{"prompt": "p", "answer": "a"}\n')
        yield running


def run(folder, url, *settings, **environment):
    """Return the exit code and the lines on stderr."""
    (folder / "job.yaml").write_text(JOB)
    shell = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    options = [part for setting in settings for part in ("--set", f"spec.{setting}")]
    done = subprocess.run(
        [RLJOB, "run", "job.yaml", "--output", "plain", *options],
        cwd=folder,
        env={**shell, "HF_HOME": str(folder / "home"), "HF_ENDPOINT": url, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not list(folder.glob("runs/*/logs")), "nothing has started"
    return done.returncode, done.stderr.strip().splitlines()


def test_gated_model_and_missing_dataset_are_one_line_each(hub, tmp_path):
    code, lines = run(tmp_path, hub.url, "data.train.source=hf://org/none")
    remedy = "set spec.hub.tokenSecretRef, or HF_TOKEN for a run on this machine"
    assert (code, lines) == (
        2,
        [
            "job.yaml:5: spec.model.source hf://org/model is gated: accept its terms at "
            f"{hub.url}/org/model, and {remedy}",
            f"job.yaml:6: spec.data.train.source dataset hf://org/none does not exist at {hub.url}, or is private; "
            f"check the name, or {remedy}",
        ],
    )


def test_token_without_access_and_missing_revision_are_one_line_each(hub, tmp_path):
    code, lines = run(tmp_path, hub.url, "data.train.revision=v9", HF_TOKEN="hf_wrong")
    assert (code, lines) == (
        2,
        [
            "job.yaml:5: spec.model.source hf://org/model is gated, and the account of the token has no access: "
            f"request it at {hub.url}/org/model",
            f"job.yaml:6: spec.data.train.revision hf://org/data has no revision v9; see {hub.url}/datasets/org/data",
        ],
    )


def test_hub_that_cannot_be_reached_is_one_line_per_source(tmp_path):
    code, lines = run(tmp_path, "http://127.0.0.1:1")
    assert code == 2
    for line, start in zip(lines, ("job.yaml:5: spec.model.source", "job.yaml:6: spec.data.train.source"), strict=True):
        assert line.startswith(f"{start} cannot reach the Hub at http://127.0.0.1:1 for hf://org/")
        assert line.endswith("check the network, set spec.hub.endpoint to a mirror, or use a local folder")


def test_token_of_the_jobs_secret_gives_access(hub, tmp_path):
    settings = ("hub.tokenSecretRef.name=s", "hub.tokenSecretRef.key=MY_TOKEN", "data.train.prompt=promt")
    code, lines = run(tmp_path, "http://127.0.0.1:1", *settings, f"hub.endpoint={hub.url}", MY_TOKEN="hf_right")
    assert code == 2
    (line,) = lines
    assert "has no column promt" in line
