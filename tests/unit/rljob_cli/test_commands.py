"""The commands between arguments and exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import yaml
from memory_plan.cases import QWEN25_1B5
from typer.testing import CliRunner

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_cli import commands
from rljob_cli.check.jobfile import JobFile
from rljob_cli.check.machine import Machine
from rljob_cli.main import app
from rljob_cli.options import JobFiles, RunOptions
from tests.support.model_folder import write_model

ONE_GPU = replace(Machine(0), num_gpus=1, gpu_bytes=lambda: 24 * 2**30)


def write_job(folder: Path, trainer: dict[str, object]) -> Path:
    write_model(folder / "model", QWEN25_1B5)
    (folder / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    spec = {
        "model": {"source": "./model"},
        "data": {"train": {"source": "train.jsonl", "prompt": "question"}},
        "rewards": [{"name": "r", "http": {"url": "http://127.0.0.1:1"}}],
        "trainer": {"gpusPerReplica": 1, **trainer},
        "rollout": {"gpusPerReplica": 1, "maxModelLen": 1536},
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


@pytest.mark.parametrize(("trainer", "placement"), [({"lora": {"rank": 8}}, "trainer"), ({}, "separate")])
def test_run_has_trainer_and_rollouts_share_the_only_gpu_if_both_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, object], placement: str
) -> None:
    checked: list[RLJob] = []

    def judge(file: JobFile, *_: object, **__: object) -> NoReturn:
        checked.append(file.job)
        raise UserError("far enough")

    monkeypatch.setattr(commands, "Machine", lambda: ONE_GPU)
    monkeypatch.setattr(commands, "judge", judge)
    path = write_job(tmp_path, trainer)
    options = RunOptions(files=JobFiles([path]), directory=tmp_path / "runs", output="plain", no_call=True)
    with pytest.raises(UserError, match="far enough"):
        commands.run_command(options)
    [job] = checked
    assert job.spec.rollout.placement == placement


FLAGS = [([], True), (["--no-call"], False), (["--dry-run"], False), (["--no-call", "--dry-run"], False)]


@pytest.mark.parametrize(("flags", "should_call"), FLAGS)
def test_submitted_job_calls_its_rewards_unless_it_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], should_call: bool
) -> None:
    given: list[bool] = []

    def judge(*_: object, should_call: bool) -> NoReturn:
        given.append(should_call)
        raise SystemExit(0)

    monkeypatch.setattr("rljob_cli.submit.command.judge", judge)
    done = CliRunner().invoke(app, ["submit", str(write_job(tmp_path, {})), *flags])
    assert (done.exit_code, given) == (0, [should_call]), done.output


def test_a_job_without_held_out_prompts_is_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_cli.evaluate.command.require", lambda command: None)
    done = CliRunner().invoke(app, ["evaluate", str(write_job(tmp_path, {})), "--dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "has no prompts to evaluate on; set data.eval or evaluation.sets" in done.output


@pytest.mark.parametrize(("gpu", "fits"), [("8GiB", False), ("400GiB", True)])
def test_plan_in_json_has_a_remedy_for_what_does_not_fit_alone(tmp_path: Path, gpu: str, fits: bool) -> None:
    path = write_job(tmp_path, {"gradientCheckpointing": "none"})
    done = CliRunner().invoke(app, ["plan", str(path), "--gpu", gpu, "-o", "json"])
    needs = json.loads(done.stdout)["files"][0]["needs"]
    assert all((need["remedy"] is not None) == (need["fits"] is False) for need in needs)
    assert {need["fits"] for need in needs if need["role"] == "trainer" and need["resource"] == "gpu"} == {fits}


@pytest.mark.parametrize(
    ("phase", "scores", "is_taught", "code"),
    [
        (0, [None, None], True, 1),
        (0, [None, None], False, 1),
        (0, [None, 1.0], True, 0),
        (1, [], True, 1),
        (130, [], True, 130),
    ],
)
def test_try_fails_and_keeps_its_folder_if_all_samples_are_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: int, scores: list[float | None], is_taught: bool, code: int
) -> None:
    folders: list[Path] = []
    results = [None] * is_taught

    def row(score: float | None) -> SimpleNamespace:
        return SimpleNamespace(score=score, rewards=results, failure=None)

    def run_file(file: JobFile, folder: Path, *_: object, is_kept: bool) -> int:
        assert not is_kept, "no path of the folder is printed"
        folder.mkdir()
        folders.append(folder)
        return phase

    monkeypatch.setattr(commands, "run_file", run_file)
    monkeypatch.setattr(commands, "read_rows", lambda *_: [row(score) for score in scores])
    monkeypatch.setattr(commands, "build_conversation", lambda row, **_: "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = CliRunner().invoke(app, ["try", str(write_job(tmp_path, {}))])
    assert done.exit_code == code
    assert ("all samples are invalid" in done.stderr) is (scores == [None, None] and is_taught)
    assert ("no reward scores this row (teacher.when)" in done.stderr) is not is_taught
    assert (commands.LEGEND in done.stdout) is bool(scores)
    assert (f"kept: {folders[0]}, with its logs" in done.stderr) is (code == 1)
    assert folders[0].exists() is (code == 1)
