"""Runs on this machine, as the commands on jobs show them."""

from __future__ import annotations

import json
import os
import signal

import pytest
from typer.testing import CliRunner

from rljob_api.manifest.job import RLJob
from rljob_api.read.load import load_job
from rljob_api.run.metrics import append_records
from rljob_cli.commands import shorten
from rljob_cli.main import app
from rljob_cli.ui import local
from tests.paths import ROOT
from tests.support.records import step_record

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec: {model: {source: /m}, data: {train: {source: /d.jsonl}}, schedule: {steps: 5}}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of step 2 of 5 in runs/sums, in a folder without a cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    folder = tmp_path / "runs/sums"
    (folder / "logs").mkdir(parents=True)
    (folder / "job.yaml").write_text(JOB)
    append_records(folder / "metrics.jsonl", [step_record(2, reward=0.25)])
    (folder / "logs/sums-head-0.log").write_text("one\ntwo\n")
    (folder / "logs/sums-trainer-0.log").write_text("three\n")
    return folder


def rljob(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.output


def test_runs_are_listed_without_a_cluster(run):
    code, output = rljob("ls")
    assert code == 0
    assert output.splitlines()[1].split()[:5] == ["(here)", "sums", "Unfinished", "2/5", "0.250"]
    [row] = json.loads(rljob("ls", "-o", "json")[1])
    assert (row["namespace"], row["name"], row["step"], row["total_steps"]) == ("(here)", "sums", 2, 5)


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--kubeconfig", "config"], 1)])
def test_runs_are_listed_with_a_cluster_that_cannot_be_asked(run, tmp_path, monkeypatch, options, code):
    (tmp_path / "config").write_text("[")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    done = CliRunner().invoke(app, ["ls", "-o", "json", *options])
    assert (done.exit_code, [row["name"] for row in json.loads(done.stdout)]) == (code, ["sums"])
    assert done.stderr.startswith("warning: no cluster: ")
    done = CliRunner().invoke(app, ["ls", "--dir", "other", *options])
    assert done.stdout == "no run here; `rljob init DIR` writes a job\n"


def test_logs_of_a_run_are_those_of_its_pods(run):
    assert [line.split() for line in rljob("logs", "sums")[1].splitlines()] == [
        ["sums-head-0", "one"], ["sums-head-0", "two"], ["sums-trainer-0", "three"],
    ]  # fmt: skip
    code, output = rljob("logs", "sums", "--role", "head", "--tail", "1")
    assert (code, output.split()) == (0, ["sums-head-0", "two"])


def test_logs_of_a_run_have_the_roles_of_its_job(run):
    (run / "logs/sums-rollout-0.log").write_text("a\n")
    (run / "logs/sums-reward-head-0.log").write_text("b\n")
    (run / "job.yaml").write_text(JOB.replace("steps: 5}", "steps: 5}, rewards: [{name: a_b, judge: {}}]"))
    (run / "logs/sums-reward-a-b-03be9-0.log").write_text("c\n")
    assert rljob("logs", "sums", "--role", "head")[1].split() == ["sums-head-0", "one", "sums-head-0", "two"]
    code, output = rljob("logs", "sums", "--role", "heda")
    assert (code, "--role must be one of head, trainer, rollout, reward, reward-a_b, got heda" in output) == (2, True)
    assert rljob("logs", "sums", "--role", "reward-a_b")[1].split() == ["sums-reward-a-b-03be9-0", "c"]
    for option in (["-c", "vllm"], ["-p"]):
        code, output = rljob("logs", "sums", *option)
        assert (code, "-c and -p are of jobs in a cluster" in output) == (2, True)


def test_top_and_explain_take_a_run(run):
    assert "2 of 5" in rljob("top", "sums")[1]
    code, output = rljob("explain", "sums")
    assert code == 0
    assert "2 of 5" in output
    assert "next: rljob logs runs/sums" in output


def test_suspend_stops_a_run_in_progress_as_ctrl_c_does(run, monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    assert rljob("suspend", "sums") == (
        2,
        f"{run}: is not in progress; the `rljob run` that started it resumes it\n",
    )
    monkeypatch.setattr(local, "find_process", lambda folder: 7)
    code, output = rljob("suspend", "sums")
    assert (code, killed) == (0, [(7, signal.SIGINT)])
    assert "the same `rljob run` goes on from what it kept" in output
    (run / "service.json").touch()
    assert "the same `rljob serve` goes on from what it kept" in rljob("suspend", "sums")[1]


@pytest.mark.parametrize("command", ["resume", "restart"])
def test_run_is_resumed_by_the_command_that_started_it(run, command):
    code, output = rljob(command, "runs/sums")
    assert (code, "is a run on this machine; the `rljob run` that started it resumes it" in output) == (2, True)


@pytest.mark.parametrize("command", ["logs", "top", "explain", "suspend", "resume", "restart"])
def test_path_without_a_run_is_not_looked_for_in_a_cluster(run, command):
    code, output = rljob(command, "runs/nope")
    assert (code, "no run at runs/nope; `rljob ls` lists runs" in output) == (2, True)


@pytest.mark.parametrize(
    ("given", "meant"), [("stop", "suspend"), ("list", "ls"), ("render", "validate --render"), ("retry", "resume")]
)
def test_commands_of_others_are_answered_with_ours(given, meant):
    code, output = rljob(given, "x")
    assert code == 2
    assert f"No such command '{given}'; here it is `rljob {meant}" in output


def test_folder_that_init_wrote_is_a_job(run, tmp_path):
    assert rljob("init", "new")[0] == 0
    assert "new/rljob.yaml: RLJob new is valid" in rljob("validate", "--no-call", "new")[1]


def test_trial_has_one_step_of_two_samples_and_no_evaluation():
    job = shorten(load_job(ROOT / "examples/tiny/rljob.yaml"))
    spec = RLJob.model_validate_json(job.model_dump_json(by_alias=True, exclude_unset=True)).spec
    assert (spec.schedule.steps, spec.schedule.prompts_per_step, spec.algorithm.group_size) == (1, 2, 2)
    assert (spec.evaluation.every_steps, spec.evaluation.sets) == (0, [])
