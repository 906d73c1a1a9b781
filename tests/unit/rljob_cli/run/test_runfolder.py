"""Whether a job may resume in the folder of an earlier run."""

import pytest

from rljob_api.manifest.job import RLJob
from rljob_api.run.metrics import Metrics
from rljob_api.run.origin import FILE_ORIGIN
from rljob_cli.run import runfolder
from tests.support.records import step_record


def build_job(data=None, trainer=None, **schedule):
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t.jsonl"}} | (data or {}),
        "rewards": [{"name": "r", "function": {"inline": "def reward(): ..."}}],
        "schedule": schedule,
        "trainer": trainer or {},
    }
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec}
    )


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"steps": 9}, []),
        ({"maxStepsWithoutSignal": 0}, []),
        ({"seed": 1}, [("spec.schedule.seed", "0", "1")]),
        ({"data": {"maxPromptTokens": 64}}, []),
        ({"data": {"format": "text"}}, []),
        ({"data": {"train": {"source": "/u"}}}, [("spec.data.train.source", '"/t.jsonl"', '"/u"')]),
        ({"trainer": {"replicas": 2}}, []),
    ],
)
def test_only_mutable_fields_may_change_before_a_resume(tmp_path, change, refused):
    runfolder.prepare(tmp_path, build_job())
    complete(tmp_path, 1)
    found = runfolder.find_changed(tmp_path, build_job(**change))
    assert [(each.path, each.text_before, each.text_now) for each in found] == refused


def test_adapters_may_not_appear_before_a_resume(tmp_path):
    runfolder.prepare(tmp_path, build_job())
    complete(tmp_path, 1)
    (change,) = runfolder.find_changed(tmp_path, build_job(trainer={"lora": {"rank": 8}}))
    assert (change.path, change.text_before, change.text_now[:12]) == (
        "spec.trainer.lora",
        "its default",
        '{"rank": 8, ',
    )


def test_folder_without_the_record_of_its_job_resumes_with_any(tmp_path):
    runfolder.prepare(tmp_path, build_job())
    complete(tmp_path, 1)
    (tmp_path / FILE_ORIGIN).unlink()
    assert runfolder.find_changed(tmp_path, build_job(seed=1)) == []


def complete(folder, step):
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    checkpoint.mkdir(parents=True)
    (folder / FILE_ORIGIN).touch()
    (checkpoint / "COMPLETE").touch()


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_history_of_a_run_that_starts_over_is_removed(tmp_path, has_checkpoint):
    if has_checkpoint:
        complete(tmp_path, 1)
    for name in ("metrics.jsonl", "sessions.json", "summary.json", "report.html", "driver-summary.json"):
        (tmp_path / name).touch()
    runfolder.prepare(tmp_path, build_job())
    left = {path.name for path in tmp_path.iterdir()} - {"job.yaml", "checkpoints", FILE_ORIGIN}
    assert left == ({"metrics.jsonl", "sessions.json"} if has_checkpoint else set())


def test_reader_follows_a_file_that_grows_and_is_truncated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = runfolder.MetricsReader(path)
    assert reader.read() == Metrics()
    first, second = (step_record(number).model_dump_json() for number in (1, 2))
    path.write_text(f"{first}\n{second}\n{first[:9]}")
    assert reader.read().last_step == 2
    assert reader.read() is reader.read(), "an unchanged file is not read again"
    path.write_text(f"{first}\n")
    assert reader.read().last_step == 1
    path.unlink()
    assert reader.read() == Metrics()
