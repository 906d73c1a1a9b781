"""Which files of a run have the model of a step."""

from __future__ import annotations

import json

import pytest

from rljob_api.errors import UserError
from rljob_api.run.files import find_model, is_model_file
from rljob_api.run.folder import EXPORT, FILE_BEST, FILE_COMPLETE, FILE_DRIVER_SUMMARY, checkpoint_folder, export_folder
from rljob_api.run.summaries import BestStep, DriverSummary, format_summary


@pytest.fixture
def run(tmp_path):
    for step in (2, 4):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
        (checkpoint_folder(tmp_path, step) / FILE_COMPLETE).touch()
    best = BestStep(set="math", metric="accuracy", value=0.5, step=2)
    (tmp_path / FILE_BEST).write_text(format_summary(best))
    return tmp_path


def end(run, step, folder):
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    summary = DriverSummary(steps=4, export=str(folder), export_step=step)
    (run / FILE_DRIVER_SUMMARY).write_text(format_summary(summary))


@pytest.mark.parametrize(("name", "step"), [("last", 4), ("best", 2), ("2", 2)])
def test_checkpoint_of_a_step_is_found(run, name, step):
    found = find_model(run, name)
    folder = f"checkpoints/step-{step:06d}"
    assert (found.step, found.folder, found.is_export) == (step, folder, False)
    assert [file.name for file in found.files] == [f"{folder}/{FILE_COMPLETE}"]


@pytest.mark.parametrize(("step", "names"), [(4, ["last", "4"]), (2, ["best", "2"])])
def test_export_at_the_end_is_of_the_step_that_the_summary_names(run, step, names):
    end(run, step, run / EXPORT)
    assert {(find_model(run, name).folder, find_model(run, name).step) for name in names} == {(EXPORT, step)}
    other = "best" if step == 4 else "last"
    assert not find_model(run, other).is_export


def test_export_of_each_checkpoint_is_found(run):
    end(run, 4, export_folder(run, 4))
    assert find_model(run, "last").folder == "exports/step-000004"


def test_steps_that_the_run_does_not_have_are_refused(run):
    with pytest.raises(UserError, match=r"^the run has no checkpoint of step 3; it has 2, 4$"):
        find_model(run, "3")
    best = json.loads((run / FILE_BEST).read_text())
    (run / FILE_BEST).write_text(json.dumps(best | {"step": 0}))
    with pytest.raises(UserError, match=r"^the best model of the run is that before training"):
        find_model(run, "best")
    (run / FILE_BEST).unlink()
    with pytest.raises(UserError, match=r"has no best.json: set evaluation.best"):
        find_model(run, "best")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("export/config.json", True),
        ("exports/step-000010/adapter/adapter_config.json", True),
        ("checkpoints/step-0000010/trainer/.metadata", True),
        ("checkpoints/damaged-step-000010/driver.json", False),
        ("export", False),
        ("export/../metrics.jsonl", False),
        ("export/./config.json", False),
        ("exports/latest/config.json", False),
        ("/export/config.json", False),
        ("export//config.json", False),
    ],
)
def test_only_files_of_models_have_their_names(name, is_one):
    assert is_model_file(name) is is_one
