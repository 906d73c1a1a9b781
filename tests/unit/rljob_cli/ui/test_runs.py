"""The runs that a page lists."""

import json
import os
import shutil

import pytest

from rljob_api.errors import UserError
from rljob_api.run.metrics import append_records
from rljob_api.wire.driver_status import DriverStatus
from rljob_cli.run.runfolder import lock
from rljob_cli.ui.runs import RunList, find_differences
from tests.paths import DATA
from tests.support.records import step_record

RECORDED = DATA / "report"


def add(parent, name):
    shutil.copytree(RECORDED, parent / name)
    return parent / name


def test_runs_of_a_folder_are_listed_and_new_ones_found(tmp_path):
    add(tmp_path, "b")
    (tmp_path / "notes").mkdir()
    runs = RunList([str(tmp_path)], tmp_path / "none")
    assert list(runs.read()) == ["b"]
    add(tmp_path, "a")
    assert list(runs.read()) == ["b", "a"], "a run keeps its place"


def test_runs_are_named_by_folder_or_name_and_have_different_names(tmp_path):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        add(tmp_path / parent, "sums")
    runs = RunList([str(tmp_path / "x" / "sums"), "sums", "sums"], tmp_path / "y")
    assert {name: run.folder for name, run in runs.read().items()} == {
        "sums": tmp_path / "x" / "sums",
        "y/sums": tmp_path / "y" / "sums",
    }


def test_nothing_to_show_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, directory in (([], tmp_path), ([], tmp_path / "none"), ([str(tmp_path / "empty")], tmp_path)):
        with pytest.raises(UserError, match="no run has started here"):
            RunList(arguments, directory)
    with pytest.raises(UserError, match="run not found"):
        RunList(["sums"], tmp_path)


def test_run_in_progress_is_running_until_its_process_is_gone(tmp_path):
    folder = add(tmp_path, "letters")
    (folder / "summary.json").unlink()
    sessions = json.loads((folder / "sessions.json").read_text())
    sessions[-1]["phase"] = ""
    (folder / "sessions.json").write_text(json.dumps(sessions))
    job = folder / "job.yaml"
    job.write_text(job.read_text().replace("steps: 8", "steps: 9"))
    run = RunList([], tmp_path).read()["letters"]
    with lock(folder):
        assert run.describe().phase == "Running"
    assert run.describe().phase == "Unfinished"
    run.head.status = DriverStatus()
    assert run.describe().phase == "Running", "a job of a cluster, whose folder here is a copy"
    run.head.status = None
    for left in ("pid 4194305, since 2026-01-01T00:00:00+00:00", f"pid {os.getpid()}, since 2026-01-01T00:00:00+00:00"):
        (tmp_path / ".letters.lock").write_text(left)
        assert run.describe().phase == "Unfinished", "it was killed, and its number may be another process's by now"


def test_line_of_a_run_follows_its_metrics(tmp_path):
    run = RunList([str(add(tmp_path, "letters"))], tmp_path).read()["letters"]
    line = run.describe()
    assert (line.phase, line.step, line.total_steps, line.reward) == (
        "Succeeded",
        8,
        8,
        pytest.approx(0.3375, abs=1e-3),
    )
    append_records(run.folder / "metrics.jsonl", [step_record(9, reward=0.75)])
    assert (run.describe().step, run.describe().reward) == (9, 0.75)


def test_list_says_what_differs_between_runs(tmp_path):
    runs = {name: {"trainer": {"learningRate": rate}, "seed": 3, "rewards": [{"inline": code * 40}]}
            for name, rate, code in (("a", 1e-6, "x"), ("b", 1e-5, "y"))}  # fmt: skip
    found = find_differences(runs)
    assert found["a"].startswith('rewards[0].inline "xxxxxxx... (')
    assert found["a"].endswith("), trainer.learningRate 1e-06")
    assert found["a"].split(", ")[0][-10:] != found["b"].split(", ")[0][-10:], "code is compared by its digest"
    assert "seed" not in found["b"]
    assert find_differences({"a": runs["a"]}) == {"a": ""}


def test_settings_have_no_secret_and_the_code_of_named_files(tmp_path):
    run = RunList([str(add(tmp_path, "letters"))], tmp_path).read()["letters"]
    (run.folder / "origin.json").write_text(
        json.dumps({"fields": {}, "contents": {"spec.rewards[0].function.file": "c0de"}})
    )
    settings = run.settings()
    assert settings["content of"] == {"spec.rewards[0].function.file": "c0de"}
    assert "not-for-readers" not in json.dumps(settings)
