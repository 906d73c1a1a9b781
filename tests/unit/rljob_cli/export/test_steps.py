"""Which checkpoint is meant, and the process that exports it."""

import subprocess
import sys

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_BEST, FILE_COMPLETE, checkpoint_folder
from rljob_api.run.summaries import BestStep, format_summary
from rljob_cli.export.steps import export_step, is_step, read_step
from rljob_inputs.machine import installation


def test_last_is_the_newest_complete_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"^--step last: .* has no checkpoint$"):
        read_step(tmp_path, "last", "--step last")
    for step in (10, 20, 30):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
    for step in (10, 20):
        (checkpoint_folder(tmp_path, step) / FILE_COMPLETE).touch()
    assert read_step(tmp_path, "last", "") == 20
    assert read_step(tmp_path, "10", "") == 10


def test_best_is_what_the_run_has_written(tmp_path):
    with pytest.raises(UserError, match=r"^--step best: .* has no best.json: set evaluation.best in the job"):
        read_step(tmp_path, "best", "--step best")
    (tmp_path / FILE_BEST).write_text(format_summary(BestStep(set="eval", metric="accuracy", value=0.5, step=10)))
    assert read_step(tmp_path, "best", "") == 10


def test_only_numbers_last_and_best_name_steps():
    assert [name for name in ("7", "last", "best", "final", "-1", "") if is_step(name)] == ["7", "last", "best"]


def test_export_without_the_trainer_names_the_extra(tmp_path, monkeypatch):
    for extra in ("cpu", "gpu"):
        monkeypatch.setitem(installation.MODULES, extra, ("rljob_trainer_absent",))
    with pytest.raises(UserError, match=r"^--model sums@20 needs the extra (cpu|gpu) \(.*rljob_trainer"):
        export_step(tmp_path, 20, tmp_path / "to", "--model sums@20")


def test_the_trainer_of_this_installation_exports(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: called.append(command) or subprocess.CompletedProcess(command, 0)
    )
    export_step(tmp_path, 20, tmp_path / "to", "")
    program = [sys.executable, "-m", "rljob_trainer.policy.export_step"]
    assert called == [[*program, str(tmp_path), "20", str(tmp_path / "to")]]
