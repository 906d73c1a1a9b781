"""A run that is stopped, resumed or fails: what is printed again, and what its summary and report say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.model_folder import write_model
from tests.support.waiting import DEADLINE_SECONDS

_SLEEP = "import time; time.sleep(300)"
# In place of the driver: resumes from its checkpoint, adds a step with a checkpoint, and waits.
_DRIVER = """\
import json, os, pathlib, time
run = pathlib.Path(os.environ["RLJOB_RUN_DIR"])
done = len(list(run.glob("checkpoints/*/COMPLETE")))
rows = [{"type": "eval", "step": 0, "accuracy": 0.25, "means": {"score": 0.25}, "num_samples": 1}] * (done == 0)
rows += [{"type": "step", "step": done + 1, "reward": 0.5, "num_samples": 1, "phase_seconds": {"update": 0.01}}]
with (run / "metrics.jsonl").open("a") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
folder = run / "checkpoints" / f"step-{done + 1:06d}"
folder.mkdir(parents=True)
(folder / "COMPLETE").touch()
time.sleep(300)
"""


def _container(role, script):
    return {"spec": {"containers": [{"name": role, "command": ["python", "-c", script]}]}}


@pytest.fixture
def job(tmp_path):
    write_model(tmp_path / "model", {"max_position_embeddings": 2048})
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")
    function = {"name": "r", "function": {"file": "reward.py"}, "template": _container("reward", _SLEEP)}
    spec = {
        "model": {"source": "./model"},
        "data": {"train": {"source": "train.jsonl"}},
        "rewards": [function],
        "schedule": {"steps": 4},
        **{role: {"template": _container(role, _SLEEP)} for role in ("trainer", "rollout")},
        "head": {"template": _container("head", _DRIVER)},
    }
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "again"}, "spec": spec}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(manifest))
    return path


def run_until(job, text, number=signal.SIGINT):
    """Run the job, signal it once it has printed `text`, and return all that it printed."""
    command = [
        sys.executable,
        "-m",
        "rljob_cli.main",
        "run",
        str(job),
        "--no-call",
        "--dir",
        str(job.parent),
        "--output",
        "plain",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if text in line:
                os.kill(process.pid, number)
        code = process.wait(DEADLINE_SECONDS)
    assert code == (130 if number == signal.SIGINT else -number), "".join(lines)
    return "".join(lines)


def test_resumed_run_prints_only_new_steps_and_counts_all_sessions(job):
    first = run_until(job, "step 1/4")
    assert "0.250 (step 0; interrupted before the last)" in first
    second = run_until(job, "step 2/4")
    assert "resumes after step 1, the last checkpoint in" in second
    assert "step 1/4" not in second
    assert "evaluation after step 0" not in second

    summary = json.loads((job.parent / "again" / "summary.json").read_text())
    earlier, later = summary["sessions"]
    assert [(s["phase"], s["after_step"], s["last_step"]) for s in (earlier, later)] == [
        ("Interrupted", 0, 1),
        ("Interrupted", 1, 2),
    ]
    assert summary["wall_seconds"] == pytest.approx(earlier["seconds"] + later["seconds"], abs=0.01)
    assert sum(summary["phase_seconds"].values()) <= summary["wall_seconds"]
    assert (summary["restarts"]["head"], later["failures"]) == (0, []), "Pods that Ctrl-C stops have not failed"
    page = (job.parent / "again" / "report.html").read_text()
    assert "2 of 4; the same `rljob run` resumes after step 2" in page


def test_session_that_was_killed_still_counts(job):
    run_until(job, "step 1/4", signal.SIGKILL)
    run_until(job, "step 2/4")
    killed, later = json.loads((job.parent / "again" / "sessions.json").read_text())
    assert (killed["phase"], later["phase"], later["after_step"]) == ("", "Interrupted", 1)
    assert killed["started"] <= later["started"]
    assert "no: it runs, or was killed" in (job.parent / "again" / "report.html").read_text()


def test_report_of_a_failed_run_has_the_reason_and_the_containers_that_ended(job):
    manifest = json.loads(job.read_text())
    failing = "import sys; print('error: spec.model.source: no such model'); sys.exit(78)"
    manifest["spec"]["head"]["template"] = _container("head", failing)
    job.write_text(json.dumps(manifest))
    command = [sys.executable, "-m", "rljob_cli.main", "run", str(job), "--no-call", "--dir", str(job.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 1, done.stdout + done.stderr
    [session] = json.loads((job.parent / "again" / "sessions.json").read_text())
    assert session["phase"] == "Failed"
    assert [(failure["role"], failure["exit_code"]) for failure in session["failures"]] == [("head", 78)]
    page = (job.parent / "again" / "report.html").read_text()
    assert "0 of 4; the same `rljob run` starts over, since there is no checkpoint" in page
    failures = page.partition("Containers that ended with an error")[2]
    assert "error: spec.model.source: no such model" in failures
