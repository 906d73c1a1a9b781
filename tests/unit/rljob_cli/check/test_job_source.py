"""job://NAME@STEP on this machine: which step it is, and what a run keeps."""

from __future__ import annotations

import json
import os
from unittest.mock import Mock

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.immutable_fields import read_resume_fields
from rljob_api.run.folder import FILE_BEST, FILE_COMPLETE, FILE_JOB, checkpoint_folder, export_folder
from rljob_api.run.origin import FILE_ORIGIN, build_origin
from rljob_api.run.start_model import FILE_PIN
from rljob_cli.check import job_source
from rljob_cli.check.job_source import MODEL, find_start_model, require_weights
from rljob_cli.check.jobfile import load, load_partial
from rljob_cli.check.preflight import check_objects
from rljob_cli.check.samples import load_job_tokenizer
from rljob_cli.check.verdict import judge
from rljob_cli.run import runfolder
from tests.support.hub import run_hub
from tests.support.memory_backend import make_job
from tests.support.model_folder import write_model
from tests.unit.rljob_cli.check.test_jobfile import JOB


@pytest.fixture
def runs(tmp_path):
    """The parent of a run with checkpoints of the steps 2 and 4."""
    folder = tmp_path / "runs" / "sums"
    for step in (2, 4):
        checkpoint_folder(folder, step).mkdir(parents=True)
        (checkpoint_folder(folder, step) / FILE_COMPLETE).touch()
    (folder / FILE_JOB).write_text("spec: {model: {source: 'hf://org/base'}}")
    return tmp_path / "runs"


def write_best(runs, step):
    best = {"set": "math", "metric": "accuracy", "value": 0.5, "step": step}
    (runs / "sums" / FILE_BEST).write_text(json.dumps(best))


def write_export(runs, step):
    folder = export_folder(runs / "sums", step)
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    return folder


@pytest.mark.parametrize(
    ("name", "step"), [("sums@2", 2), ("sums@4", 4), ("sums@last", 4), ("sums", 4), ("sums@best", 2)]
)
def test_step_is_found_and_has_the_shape_of_the_base_model(runs, name, step):
    write_best(runs, 2)
    start = find_start_model(f"job://{name}", runs, None)
    assert (start.pin.step, start.pin.run) == (step, str(runs / "sums"))
    assert (start.path, start.has_weights, start.is_pinned) == ("hf://org/base", False, False)
    with pytest.raises(UserError, match=rf"job://{name} is step {step} .* not exported.*rljob export .* --step {step}"):
        require_weights(start)


def test_export_of_the_step_is_used_unless_an_older_training_made_it(runs):
    folder = write_export(runs, 4)
    start = find_start_model("job://sums@4", runs, None)
    assert (start.path, start.has_weights) == (str(folder), True)
    os.utime(folder, (0, 0))
    assert not find_start_model("job://sums@4", runs, None).has_weights


def test_export_whose_checkpoint_is_removed_is_enough(runs):
    write_export(runs, 1)
    assert find_start_model("job://sums@1", runs, None).has_weights


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("job://other", "needs the run .*/other, which does not exist; correct the name"),
        ("job://sums@3", "needs a checkpoint of step 3 of .*/sums, which has checkpoints of the steps 2, 4; name one"),
        ("job://sums@best", "needs the best step of .*/sums, but best.json names no step that has trained"),
    ],
)
def test_missing_runs_and_steps_are_named(runs, source, message):
    write_best(runs, 0)
    with pytest.raises(UserError, match=message):
        find_start_model(source, runs, None)


def test_run_without_a_checkpoint_says_so(runs):
    (runs / "new").mkdir()
    (runs / "new" / FILE_JOB).write_text("{}")
    with pytest.raises(UserError, match=r"needs a checkpoint of step last of .*/new, which has no checkpoint"):
        find_start_model("job://new", runs, None)


@pytest.mark.parametrize("source", ["hf://org/model", "/m", "s3://bucket/m", "job:/sums"])
def test_other_sources_are_left_alone(runs, source):
    assert find_start_model(source, runs, runs / "j") is None


def pin(runs, source):
    folder = runs / "j"
    (folder / MODEL).mkdir(parents=True)
    (folder / MODEL / "config.json").touch()
    (folder / FILE_PIN).write_text(json.dumps({"source": source, "run": str(runs / "sums"), "step": 2}))
    return folder


def test_run_keeps_its_model_though_the_other_one_has_gone_on(runs):
    folder = pin(runs, "job://sums@last")
    start = find_start_model("job://sums@last", runs, folder)
    assert (start.pin.step, start.is_pinned, start.path) == (2, True, str(folder / MODEL))
    (runs / "sums" / FILE_JOB).unlink()
    assert find_start_model("job://sums@last", runs, folder).is_pinned, "nor does it need the other run"


def test_another_source_or_a_lost_model_is_chosen_again(runs):
    folder = pin(runs, "job://sums@last")
    assert find_start_model("job://sums@4", runs, folder).pin.step == 4
    (folder / MODEL / "config.json").unlink()
    assert find_start_model("job://sums@last", runs, folder).pin.step == 4


def test_job_file_has_the_path_and_knows_what_it_means(runs, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("./model", "job://sums@2"))
    file = load(path, runs=runs)
    assert (file.job.spec.model.source, file.start.pin.step) == ("hf://org/base", 2)
    pin(runs, "job://sums@2")
    assert load(path, runs=runs).job.spec.model.source == str(runs / "j" / MODEL)
    assert load_partial(path, runs=runs, resumes=False).job.spec.model.source == "hf://org/base"
    assert load(path, runs=runs, keep_references=True).job.spec.model.source == "job://sums@2"


@pytest.mark.parametrize("step", ["2", "3"])
def test_cluster_has_runs_of_its_own(runs, tmp_path, step):
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("./model", f"job://sums@{step}"))
    found = check_objects(load_partial(path, runs=runs)) + check_objects(load_partial(path, keep_references=True))
    assert [finding for finding in found if finding.path == "spec.model.source"] == []


def test_run_that_is_missing_here_is_a_problem_of_this_machine_alone(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("./model", "job://sums@2"))
    file = load_partial(path, runs=tmp_path)
    [problem] = file.local_problems
    assert str(problem).startswith("spec.model.source needs the run")
    assert (problem.line, file.problems) == (5, ())


def test_run_that_starts_over_does_not_begin_with_itself(runs, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("name: j", "name: sums").replace("./model", "job://sums@2"))
    file = load_partial(path, runs=runs, resumes=False)
    [problem] = file.local_problems
    assert "is the run that --fresh moves away" in str(problem)
    assert load_partial(path, runs=runs).local_problems == ()


@pytest.mark.parametrize("is_offline", [False, True])
def test_copy_of_a_model_replaces_one_that_neither_the_hub_nor_its_cache_has(tmp_path, monkeypatch, capsys, is_offline):
    """Offline, with what `make demo` has written next to the checkout, or above the job."""
    asked = []

    def find_repository(source, *_):
        asked.append(source)
        if is_offline:
            raise TransientError("cannot reach the Hub")

    monkeypatch.setattr(job_source, "find_repository", find_repository)
    copy = tmp_path / ".models" / "small-1b"
    copy.mkdir(parents=True)
    monkeypatch.setattr(job_source, "_CHECKOUT", tmp_path)
    job = make_job(model={"source": "hf://org/Small-1B"})
    used = job_source.use_copy(job, tmp_path.parent, None)
    assert used.spec.model.source == (str(copy) if is_offline else "hf://org/Small-1B")
    assert (f"takes the copy {copy}" in capsys.readouterr().err) is is_offline
    for other in ("hf://org/other", "./small-1b"):
        job = make_job(model={"source": other})
        assert job_source.use_copy(job, tmp_path, None) is job
    assert asked == ["hf://org/Small-1B"], "without a copy, the checks ask the Hub once"


@pytest.mark.parametrize(("source", "is_kept"), [(".models/small", True), ("hf://org/small", False)])
def test_run_that_began_with_a_copy_resumes_with_it_though_the_hub_answers(tmp_path, monkeypatch, source, is_kept):
    """Else its checkpoints are of another job than the one that goes on."""
    monkeypatch.setattr(job_source, "find_repository", lambda *_: Mock(is_cached=False))
    copy = tmp_path / ".models/small"
    copy.mkdir(parents=True)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("./model", "hf://org/small"))
    run = tmp_path / "runs/j"
    (run / "checkpoints/step-000002").mkdir(parents=True)
    (run / "checkpoints/step-000002" / FILE_COMPLETE).touch()
    began = load(path, [f"spec.model.source={copy if is_kept else source}"]).job
    runfolder.prepare(run, began)
    fields = read_resume_fields(began.spec)
    (run / FILE_ORIGIN).write_text(build_origin(fields.fixed, fields.recorded).model_dump_json())
    job = load(path, runs=tmp_path / "runs").job
    assert job.spec.model.source == (str(copy) if is_kept else source)
    assert runfolder.find_changed(run, job) == ([], [])
    assert load_partial(path, runs=tmp_path / "runs", resumes=False).job.spec.model.source == "hf://org/small"


@pytest.mark.parametrize("is_cached", [False, True])
def test_run_on_a_machine_without_the_hub_takes_models_from_its_cache(monkeypatch, capsys, is_cached):
    """vLLM asks the Hub first, and does not start without an answer."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(job_source, "find_repository", lambda *_: Mock(is_cached=is_cached))
    job_source.go_offline(make_job(model={"source": "hf://org/small"}))
    assert os.environ["HF_HUB_OFFLINE"] == ("1" if is_cached else "0")
    assert ("takes hf://org/small from its cache" in capsys.readouterr().err) is is_cached


@pytest.mark.parametrize("has_copy", [False, True])
def test_hub_is_asked_once_for_a_model_by_all_that_checks_it(tmp_path, monkeypatch, has_copy):
    """By the copy in .models, the checks, which run in a process of their own, and the samples of a reward."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / ".models" / ("small" if has_copy else "other")).mkdir(parents=True)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("./model", "hf://org/small"))
    with run_hub(tmp_path / "hub") as hub:
        hub.add("models/org/small", write_model(tmp_path / "model"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        file = load_partial(path, runs=tmp_path)
        judge(file, tmp_path / "run", {}, should_call=False)
        assert load_job_tokenizer(file.job) is not None
    assert [request for request in hub.requests if request.startswith("GET /api/models/")] == [
        "GET /api/models/org/small"
    ]
