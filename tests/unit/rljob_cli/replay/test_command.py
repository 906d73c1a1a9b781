"""`rljob run --from-trajectories` refuses before anything starts, and prints the comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rljob_api.run.folder import FILE_JOB, FILE_METRICS, trajectory_file
from rljob_api.run.metrics import append_records
from rljob_cli.check.jobfile import load
from rljob_cli.main import app
from rljob_cli.replay import command
from rljob_cli.run import runfolder
from tests.support.records import step_record

Replay = Callable[..., Result]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("rljob_cli.commands.has_bfloat16", lambda: True)
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?"}\n')
    path = tmp_path / "job.yaml"
    spec: dict[str, Any] = {
        "model": {"source": str(model)},
        "data": {"train": {"source": str(tmp_path / "train.jsonl"), "prompt": "question"}, "format": "text"},
        "rewards": [{"name": "correct", "function": {"inline": "def compute_score(*a): return 1.0"}}],
        "algorithm": {"groupSize": 2},
    }
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    path.write_text(yaml.safe_dump(manifest))
    return path


@pytest.fixture
def run(job: Path, tmp_path: Path) -> Path:
    """The folder of a run of three steps."""
    folder = tmp_path / "runs" / "j"
    runfolder.prepare(folder, load(job).job)
    for step in (1, 2, 3):
        trajectory_file(folder, step, "train").parent.mkdir(exist_ok=True)
        trajectory_file(folder, step, "train").touch()
        append_records(folder / FILE_METRICS, [step_record(step, loss=0.5, grad_norm=2.0, weight_digest=f"d{step}")])
    return folder


@pytest.fixture
def replay(job: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """Call the command with processes that write the losses of `losses`."""
    losses = {1: 0.5, 2: 0.5, 3: 0.75}

    def play(job: Any, run: Path, plan: Any, folder: Path, network: Any, claims: Any, show: Any) -> None:
        for step in plan.steps:
            digest = f"d{step}" if losses[step] == 0.5 else "other"
            record = step_record(step, loss=losses[step], grad_norm=2.0, weight_digest=digest, step_seconds=1.0)
            append_records(folder / FILE_METRICS, [record])
            show(record)

    monkeypatch.setattr(command, "run_replay", play)
    monkeypatch.setattr(command, "claim_block", lambda seed, block: None)

    def call(*arguments: str) -> Result:
        defaults = ["run", str(job), "--dir", str(run.parent), "--from-trajectories", "j"]
        return CliRunner().invoke(app, [*defaults, *arguments])

    return call


def test_equal_steps_are_printed_as_equal(replay: Replay, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = replay("--steps", "1:2")
    assert result.exit_code == 0, result.output
    assert "replays steps 1 to 2 from the initial model\nthe job is that of the run\nstep 1: equal" in result.output
    assert "equal to the run: all numbers, and the weights bit by bit" in result.output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "the run is only read"


def test_json_has_numbers_and_differences(replay: Replay, run: Path) -> None:
    result = replay("-o", "json", "--set", "spec.algorithm.loss.clipHigh=0.3")
    found = json.loads(result.stdout)
    assert (found["is_equal"], found["checkpoint"]) == (False, None)
    assert found["changes"] == ["spec.algorithm.loss.clipHigh: none -> 0.3"]
    assert [step["has_equal_weights"] for step in found["steps"]] == [True, True, False]
    last = found["steps"][-1]
    assert [last[part]["loss"] for part in ("recorded", "replayed", "difference")] == [0.5, 0.75, 0.25]
    assert found["folder"] == str(run.parent / "j-replay")


def test_second_replay_needs_fresh_and_keeps_the_first(replay: Replay, run: Path) -> None:
    replay()
    refused = replay()
    assert refused.exit_code == 2
    assert "has an earlier replay; pass --fresh" in refused.output
    assert replay("--fresh").exit_code == 0
    assert len(list(run.parent.glob("j-replay*/metrics.jsonl"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "9:8"), "--steps must be A:B"),
        (("--steps", "2:4"), "--steps 2:4: step 4 not in the log, which has steps 1 to 3"),
        (("--set", "spec.algorithm.groupSize=4"), "spec.algorithm.groupSize must be 2, as in the run, got 4"),
        (("--from-trajectories", "none"), "run not found"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_remedy(
    replay: Replay, run: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = replay(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not (run.parent / "j-replay").exists(), "nothing was started"


def test_run_without_a_log_is_refused(replay: Replay, run: Path) -> None:
    for file in (run / "trajectories").iterdir():
        file.unlink()
    result = replay()
    assert result.exit_code == 2
    assert "no step of training; a run writes them unless spec.tracking.trajectoriesSize is 0" in result.output


def test_run_without_its_job_is_refused(replay: Replay, run: Path) -> None:
    (run / FILE_JOB).unlink()
    result = replay()
    assert result.exit_code == 2
    assert "job.yaml: cannot be read; a replay compares its job" in result.output


def test_steps_without_a_run_are_refused(job: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(job), "--steps", "1:2"])
    assert result.exit_code == 2
    assert "--steps is for --from-trajectories RUN" in result.output
