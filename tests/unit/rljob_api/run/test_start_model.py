"""Which exports a run has, and which one job://NAME@STEP means."""

import json
import os
import shutil

import pytest

from rljob_api.errors import UserError
from rljob_api.run.folder import EXPORT, FILE_BEST, FILE_COMPLETE, FILE_DRIVER_SUMMARY, checkpoint_folder, export_folder
from rljob_api.run.start_model import FILE_PIN, choose_export, find_exports, read_pin


@pytest.fixture
def run(tmp_path):
    """A run with exports of the steps 2 and 4, and one of its end, of step 5."""
    run = tmp_path / "sums"
    for step in (2, 4):
        export_folder(run, step).mkdir(parents=True)
    (run / EXPORT).mkdir()
    write_summary(run, 5)
    return run


def write_summary(run, step):
    summary = {"export": f"/var/lib/rljob/{EXPORT}", "export_step": step}
    (run / FILE_DRIVER_SUMMARY).write_text(json.dumps(summary))


def write_best(run, step):
    best = {"set": "math", "metric": "accuracy", "value": 0.5, "step": step}
    (run / FILE_BEST).write_text(json.dumps(best))


def test_exports_are_found_by_step(run):
    assert list(find_exports(run).items()) == [
        (2, export_folder(run, 2)),
        (4, export_folder(run, 4)),
        (5, run / EXPORT),
    ]
    shutil.rmtree(run / EXPORT)
    assert list(find_exports(run)) == [2, 4]


def test_export_of_an_earlier_training_of_a_step_does_not_count(run):
    checkpoint_folder(run, 4).mkdir(parents=True)
    (checkpoint_folder(run, 4) / FILE_COMPLETE).touch()
    os.utime(export_folder(run, 4), (0, 0))
    assert list(find_exports(run)) == [2, 5]


@pytest.mark.parametrize(("step", "chosen"), [("2", 2), ("last", 5), ("best", 4)])
def test_step_is_chosen(run, step, chosen):
    write_best(run, 4)
    assert choose_export(run, step) == chosen


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            "3",
            "needs an export of the step 3 of sums, which has exports of the steps 2, 4, 5; name such a step, or set c",
        ),
        ("best", "needs the best step of sums, but its best.json names no step that has trained"),
    ],
)
def test_step_that_is_not_exported_is_named_with_those_that_are(run, step, message):
    with pytest.raises(UserError, match=message):
        choose_export(run, step)


def test_run_without_an_export_or_a_folder_says_so(tmp_path):
    (tmp_path / "sums").mkdir()
    with pytest.raises(
        UserError, match=r"step last of sums, which has no export; .*checkpoint\.exportPolicy in sums: last a"
    ):
        choose_export(tmp_path / "sums", "last")
    with pytest.raises(UserError, match="which does not exist: other has not started with this claim"):
        choose_export(tmp_path / "other", "last")


def test_damaged_pin_is_none(run):
    (run / FILE_PIN).write_text("{")
    assert read_pin(run) is None
