"""Which checkpoint is meant, and the process that exports it."""

import subprocess
import sys

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_BEST, FILE_COMPLETE, checkpoint_folder, export_folder
from rljob_api.run.start_model import FILE_PIN
from rljob_api.run.summaries import BestStep, format_summary
from rljob_cli.check.job_source import MODEL, find_start_model, read_pin
from rljob_cli.export import steps
from rljob_cli.export.steps import export_step, is_step, provide_model, read_step
from rljob_inputs.machine import installation
from tests.unit.rljob_cli.check.test_job_source import runs, write_export  # noqa: F401 - a fixture


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


@pytest.fixture
def exports(monkeypatch):
    """The steps that were exported."""
    asked = []

    def export_step(run, step, to, given):
        asked.append(step)
        to.mkdir()
        (to / "config.json").write_text(f"{step}")

    monkeypatch.setattr(steps, "export_step", export_step)
    return asked


def find(runs, source="job://sums@last"):  # noqa: F811
    return find_start_model(source, runs, runs / "j")


def test_checkpoint_is_exported_once_and_pinned(runs, exports, tmp_path):  # noqa: F811
    lines = []
    assert provide_model(find(runs), runs / "j", lines.append) == str(runs / "j" / MODEL)
    assert (exports, read_pin(runs / "j").step) == ([4], 4)
    provide_model(find(runs), runs / "j", lines.append)
    assert exports == [4]
    assert lines == [f"starts from step 4 of {runs}/sums", f"starts from step 4 of {runs}/sums, as before"]


def test_export_that_exists_is_taken_and_survives_its_run(runs, exports):  # noqa: F811
    (write_export(runs, 4) / "config.json").write_text("of the run")
    model = provide_model(find(runs), runs / "j", print)
    assert exports == []
    (export_folder(runs / "sums", 4) / "config.json").unlink()
    assert (runs / "j" / MODEL / "config.json").read_text() == "of the run"
    assert model == str(runs / "j" / MODEL)


def test_failed_export_leaves_no_pin_and_the_next_start_repeats_it(runs, exports, monkeypatch):  # noqa: F811
    (runs / "j").mkdir()
    (runs / "j" / FILE_PIN).write_text("of another source")

    def fail(run, step, to, given):
        raise UserError(f"{given}: the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(steps, "export_step", fail)
        with pytest.raises(UserError, match=r"^spec.model.source: the disk is full"):
            provide_model(find(runs), runs / "j", print)
    assert not (runs / "j" / FILE_PIN).exists()
    provide_model(find(runs), runs / "j", print)
    assert exports == [4]
