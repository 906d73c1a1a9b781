"""The command line: exit codes and messages, without a process."""

from __future__ import annotations

import base64

import pytest
from typer.testing import CliRunner

from rljob_cli.main import app


def rljob(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, done.output


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A valid job in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")
    path = tmp_path / "job.yaml"
    path.write_text(
        """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sleepy}
spec:
  model: {source: hf://org/model}
  data: {train: {source: train.jsonl}}
  rewards: [{name: r, function: {file: reward.py}}]
"""
    )
    return path


def test_run_with_a_missing_data_file_prints_line_and_field(job):
    job.write_text(job.read_text().replace("train.jsonl", "none.jsonl"))
    code, output = rljob("run", job, "--dir", job.parent / "runs")
    assert code == 2
    assert output.startswith(f"{job}:6: spec.data.train.source file {job.parent}/none.jsonl not found")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "taken"], "taken: File exists; fix the file, or pass another path"),
        (["init", "n" * 300], "File name too long"),
        (["validate", "."], ".: not a file; pass the path of a job's YAML file"),
        (["validate", "none.yaml"], "none.yaml: not found; pass the path of a job's YAML file"),
        (["validate", "job.yaml", "--volume", "claim"], "--volume must be CLAIM=DIR, got claim"),
        (["run", "job.yaml", "--dir", "taken"], "taken: File exists"),
        (["run", "job.yaml", "--output", "xml"], "--output must be one of live, plain, json, got xml"),
        (["test-reward", "job.yaml", "--file", "latin-1"], "latin-1: is not UTF-8 text"),
        (["test-reward", "job.yaml", "--completion", "x", "--reward", "z"], "that the job serves, got z; it serves r"),
    ],
)
def test_invalid_argument_is_one_line_and_exit_code_2(job, arguments, message):
    (job.parent / "taken").touch()
    (job.parent / "latin-1").write_bytes(b"\xff\n")
    code, output = rljob(*arguments)
    assert (code, output.count("\n")) == (2, 1), output
    assert message in output


def test_init_writes_a_valid_job_once(tmp_path):
    folder = tmp_path / "My first job"
    assert rljob("init", folder)[0] == 0
    code, output = rljob("validate", folder / "rljob.yaml")
    assert code == 0, output
    code, output = rljob("init", folder)
    assert code == 2
    assert "already has rljob.yaml" in output


def test_render_prints_objects_with_a_placeholder_token(job):
    code, output = rljob("render", job)
    assert code == 0
    assert base64.b64encode(b"RENDERED-WITHOUT-A-TOKEN").decode() in output
    assert "kind: StatefulSet" in output
