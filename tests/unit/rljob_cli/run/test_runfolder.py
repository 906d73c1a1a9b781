"""Whether a job may resume in the folder of an earlier run."""

import pytest

from rljob_api.manifest.immutable_fields import pick_resume_fields
from rljob_api.manifest.job import RLJob
from rljob_api.run.metrics import Metrics, append_records
from rljob_api.run.origin import FILE_ORIGIN, Origin, build_origin
from rljob_cli.run import runfolder
from tests.support.records import step_record

REWARD = {"name": "r", "function": {"inline": "def reward(): ..."}}


def build_job(data=None, trainer=None, rewards=None, algorithm=None, sampling=None, **schedule):
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t.jsonl"}} | (data or {}),
        "rewards": [REWARD | (rewards or {})],
        "algorithm": algorithm or {},
        "rollout": {"sampling": sampling or {}},
        "schedule": schedule,
        "trainer": trainer or {},
    }
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec}
    )


@pytest.mark.parametrize(
    ("change", "refused", "allowed"),
    [
        ({"steps": 9}, [], []),
        ({"maxStepsWithoutSignal": 0}, [], []),
        ({"seed": 1}, [("spec.schedule.seed", "0", "1")], []),
        ({"promptsPerStep": 32}, [], [("spec.schedule.promptsPerStep", "64", "32")]),
        ({"data": {"maxPromptTokens": 64}}, [], []),
        ({"data": {"format": "text"}}, [("spec.data.format", '"chat"', '"text"')], []),
        ({"data": {"systemPrompt": "Be brief."}}, [("spec.data.systemPrompt", "its default", '"Be brief."')], []),
        ({"data": {"template": "Q: {prompt}"}}, [("spec.data.template", '"{prompt}"', '"Q: {prompt}"')], []),
        ({"data": {"train": {"source": "/u"}}}, [("spec.data.train.source", '"/t.jsonl"', '"/u"')], []),
        ({"trainer": {"replicas": 2}}, [], []),
        (
            {"algorithm": {"optimizer": {"learningRate": 1e-7}}},
            [],
            [("spec.algorithm.optimizer.learningRate", "1e-06", "1e-07")],
        ),
        ({"algorithm": {"type": "rloo"}}, [("spec.algorithm.type", '"grpo"', '"rloo"')], []),
        ({"sampling": {"temperature": 0.7}}, [], [("spec.rollout.sampling.temperature", "1.0", "0.7")]),
        ({"rewards": {"weight": 2}}, [], [("spec.rewards.r.weight", "1.0", "2.0")]),
        ({"rewards": {"replicas": 2}}, [], []),
    ],
)
def test_a_resume_refuses_other_prompts_and_other_models_and_names_what_else_changes(
    tmp_path, change, refused, allowed
):
    runfolder.prepare(tmp_path, build_job())
    complete(tmp_path, 1)
    found = runfolder.find_changed(tmp_path, build_job(**change))
    assert [[(each.path, each.text_before, each.text_now) for each in part] for part in found] == [refused, allowed]


def test_adapters_may_not_appear_before_a_resume(tmp_path):
    runfolder.prepare(tmp_path, build_job())
    complete(tmp_path, 1)
    (change,), _ = runfolder.find_changed(tmp_path, build_job(trainer={"lora": {"rank": 8}}))
    assert (change.path, change.text_before, change.text_now[:12]) == (
        "spec.trainer.lora",
        "its default",
        '{"rank": 8, ',
    )


def test_folder_without_the_record_of_its_job_resumes_with_any(tmp_path):
    runfolder.prepare(tmp_path, build_job())
    complete(tmp_path, 1)
    (tmp_path / FILE_ORIGIN).unlink()
    assert runfolder.find_changed(tmp_path, build_job(seed=1)) == ([], [])


def complete(folder, step):
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    checkpoint.mkdir(parents=True)
    (folder / FILE_ORIGIN).write_text(Origin(fields={}).model_dump_json())
    (checkpoint / "COMPLETE").touch()


def test_job_of_a_run_has_no_secrets_and_a_changed_one_is_no_difference(tmp_path):
    jobs = [build_job(rewards={"env": {"JUDGE_TOKEN": token}}) for token in ("correct-horse", "battery-staple")]
    runfolder.prepare(tmp_path, jobs[0])
    assert "correct-horse" not in (tmp_path / "job.yaml").read_text()
    fields = pick_resume_fields(jobs[0].spec.to_manifest(exclude_defaults=True))
    assert "correct-horse" not in build_origin(fields.fixed, fields.recorded).model_dump_json()
    (tmp_path / FILE_ORIGIN).write_text(build_origin(fields.fixed, fields.recorded).model_dump_json())
    (tmp_path / "checkpoints/step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints/step-000001/COMPLETE").touch()
    assert runfolder.find_changed(tmp_path, jobs[1]) == ([], [])


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_run_that_starts_over_removes_its_history_and_one_that_resumes_keeps_pages(tmp_path, has_checkpoint):
    if has_checkpoint:
        complete(tmp_path, 1)
    for name in ("metrics.jsonl", "sessions.json", "summary.json", "report.html", "driver-summary.json"):
        (tmp_path / name).touch()
    runfolder.prepare(tmp_path, build_job())
    left = {path.name for path in tmp_path.iterdir()} - {"job.yaml", "checkpoints", FILE_ORIGIN}
    assert left == ({"metrics.jsonl", "sessions.json", "report.html"} if has_checkpoint else set())


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


def test_reader_parses_each_line_once(tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    original = runfolder.parse_metrics

    def parse(lines):
        parsed.extend(taken := list(lines))
        return original(taken)

    monkeypatch.setattr(runfolder, "parse_metrics", parse)
    reader = runfolder.MetricsReader(path)
    for number in range(1, 6):
        append_records(path, [step_record(number)])
        assert [step.step for step in reader.read().steps] == list(range(1, number + 1))
    assert len(parsed) == 5


def test_reader_reads_again_what_a_failure_has_left(tmp_path, monkeypatch):
    path, original = tmp_path / "metrics.jsonl", runfolder.parse_metrics
    append_records(path, [step_record(number) for number in (1, 2)])
    reader = runfolder.MetricsReader(path)

    def fail(lines):
        for _ in zip(range(2), lines, strict=False):
            pass
        raise OSError("Stale file handle")

    monkeypatch.setattr(runfolder, "parse_metrics", fail)
    with pytest.raises(OSError, match="Stale"):
        reader.read()
    monkeypatch.setattr(runfolder, "parse_metrics", original)
    assert [step.step for step in reader.read().steps] == [1, 2]
