"""The step of another run that a run begins with, on a cluster: it is pinned at the first start."""

import json
import shutil
from pathlib import Path

import pytest

from rljob_api.manifest.status import StartModelStatus
from rljob_api.run.folder import EXPORT, FILE_DRIVER_SUMMARY, export_folder
from rljob_api.run.start_model import FILE_PIN, read_pin
from rljob_inputs.findings import InputError
from rljob_trainer import outages as waiting
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.origin import NotWrittenError, find_start_model, pin_start_model
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.outages import Outages
from rljob_trainer.run_folder.client import EXPORT_PARTIAL
from tests.support.job_simulation import make_job

SOURCE = "job://sums"


@pytest.fixture
def runs(tmp_path):
    """A claim with the run sums, which exports its checkpoints, and the folder of a new run."""
    export_folder(tmp_path / "sums", 2).mkdir(parents=True)
    (tmp_path / "new").mkdir()
    return tmp_path


def pin(runs, step="last", source=SOURCE):
    return pin_start_model(runs / "new", source, str(runs / "sums"), step)


def test_restart_keeps_the_step_while_the_other_run_trains_on(runs):
    first = pin(runs)
    assert first == str(export_folder(runs / "sums", 2))
    export_folder(runs / "sums", 4).mkdir()
    assert pin(runs) == first
    assert read_pin(runs / "new").step == 2


def test_another_source_chooses_again(runs):
    pin(runs)
    export_folder(runs / "sums", 4).mkdir()
    assert pin(runs, "4", "job://sums@4") == str(export_folder(runs / "sums", 4))


def test_model_that_is_gone_is_an_error_that_says_what_the_run_began_with(runs):
    pin(runs)
    shutil.rmtree(export_folder(runs / "sums", 2))
    (runs / "sums" / EXPORT).mkdir()
    (runs / "sums" / FILE_DRIVER_SUMMARY).write_text(json.dumps({"export": EXPORT, "export_step": 9}))
    with pytest.raises(InputError, match=rf"spec.model.source: {SOURCE} needs an export of the step 2 .*{FILE_PIN}"):
        pin(runs)


def test_step_without_an_export_pins_nothing(runs):
    with pytest.raises(InputError, match=rf"spec.model.source: {SOURCE} needs an export of the step 7 of sums"):
        pin(runs, "7")
    assert not (runs / "new" / FILE_PIN).exists()


def test_export_that_is_being_written_is_waited_for(runs):
    """The other run is steps ahead of the checkpoint that it writes, and its export gets its name last."""
    partial = runs / "sums" / EXPORT_PARTIAL
    partial.mkdir()
    with pytest.raises(NotWrittenError, match=r"sums writes an export .* needs an export of the step 4 of sums"):
        pin(runs, "4", "job://sums@4")
    partial.rename(export_folder(runs / "sums", 4))
    assert pin(runs, "4", "job://sums@4") == str(export_folder(runs / "sums", 4))


async def test_head_starts_once_the_export_has_its_name(runs, monkeypatch):
    monkeypatch.setattr(waiting, "PAUSES", (0.0, 0.0))
    partial, reports = runs / "sums" / EXPORT_PARTIAL, []
    partial.mkdir()

    def place(report):
        reports.append(report)
        partial.rename(export_folder(runs / "sums", 4))

    job = make_job(model={"source": "job://sums@4"})
    environment = Environment(job, Path(), runs / "new", "", str(runs / "sums"), ("/data",), {}, model_step="4")
    found, step = await find_start_model(environment, RunDisk(runs / "new"), Outages(), place)
    assert (found.model, found.model_step, step) == (str(export_folder(runs / "sums", 4)), "", 4)
    assert "sums writes an export" in reports[0]


async def test_head_without_the_runs_files_begins_with_the_step_of_the_status(runs):
    """Rollouts that live have loaded it."""
    export_folder(runs / "sums", 4).mkdir()
    job = make_job(model={"source": SOURCE})
    placed = StartModelStatus(job="sums", claim="runs", step=2)
    job = job.model_copy(update={"status": job.status.model_copy(update={"start_model": placed})})
    environment = Environment(job, Path(), runs / "new", "", str(runs / "sums"), ("/data",), {}, model_step="last")
    found, step = await find_start_model(environment, RunDisk(runs / "new"), Outages(), print)
    assert (found.model, step) == (str(export_folder(runs / "sums", 2)), 2)
    assert read_pin(runs / "new").step == 2
