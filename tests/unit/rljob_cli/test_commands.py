"""The commands between arguments and exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
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
    assert commands.run_command(options) == 2
    [job] = checked
    assert job.spec.rollout.placement == placement


FLAGS = [([], True), (["--no-call"], False), (["--dry-run"], False), (["--no-call", "--dry-run"], False)]


@pytest.mark.parametrize(("flags", "should_call"), FLAGS)
def test_submitted_evaluation_calls_its_rewards_unless_it_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], should_call: bool
) -> None:
    given: list[bool] = []

    def judge(*_: object, should_call: bool) -> NoReturn:
        given.append(should_call)
        raise SystemExit(0)

    monkeypatch.setattr("rljob_cli.submit.command.judge", judge)
    done = CliRunner().invoke(app, ["evaluate", str(write_job(tmp_path, {})), "--submit", *flags])
    assert (done.exit_code, given) == (0, [should_call]), done.output


@pytest.mark.parametrize(("gpu", "fits"), [("8GiB", False), ("400GiB", True)])
def test_plan_in_json_has_a_remedy_for_what_does_not_fit_alone(tmp_path: Path, gpu: str, fits: bool) -> None:
    path = write_job(tmp_path, {"gradientCheckpointing": "none"})
    done = CliRunner().invoke(app, ["plan", str(path), "--gpu", gpu, "-o", "json"])
    needs = json.loads(done.stdout)["files"][0]["needs"]
    assert all((need["remedy"] is not None) == (need["fits"] is False) for need in needs)
    assert {need["fits"] for need in needs if need["role"] == "trainer" and need["resource"] == "gpu"} == {fits}
