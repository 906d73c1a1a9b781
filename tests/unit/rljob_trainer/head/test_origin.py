"""A run's checkpoints are of one job: another one of the same name may not resume from them."""

from pathlib import Path

import pytest

from rljob_api.run.folder import FILE_COMPLETE, checkpoint_folder
from rljob_api.run.origin import FILE_ORIGIN, read_origin
from rljob_inputs.findings import InputError
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.origin import keep_origin
from tests.support.job_simulation import make_job

CLAIM = {"checkpoint": {"persistentVolumeClaim": {"claimName": "runs"}}}


def begin(run_dir, *, is_on_cluster=True, **spec):
    uid = "u1" if is_on_cluster else ""
    keep_origin(Environment(make_job(**spec), Path(), run_dir, "", "/m", ("/data",), {}, head_job_uid=uid))


def save(run_dir):
    folder = checkpoint_folder(run_dir, 2)
    folder.mkdir(parents=True)
    (folder / FILE_COMPLETE).touch()


@pytest.mark.parametrize(
    ("spec", "path", "before", "now"),
    [
        ({"model": {"source": "hf://org/b"}}, "spec.model.source", '"/models/tiny"', '"hf://org/b"'),
        ({"data": {"train": {"source": "hf://a/b"}}}, "spec.data.train.source", '"/data/train.jsonl"', '"hf://a/b"'),
        ({"algorithm": {"type": "rloo"}}, "spec.algorithm.type", "its default", '"rloo"'),
    ],
)
def test_other_job_of_the_name_is_refused_with_the_field_and_both_values(tmp_path, spec, path, before, now):
    begin(tmp_path, **CLAIM)
    save(tmp_path)
    with pytest.raises(InputError) as raised:
        begin(tmp_path, **CLAIM, **spec)
    place = "pvc://runs/gsm8k"
    assert raised.value.path == path
    assert raised.value.message == (
        f"is {now}, but the checkpoints in {place} are of a job with {before}; to train this job, give it another "
        f"metadata.name or another place in spec.checkpoint, or remove {place}; to go on with that one, set the fields "
        f"as they were. To use its checkpoints anyway, remove {FILE_ORIGIN} there"
    )


def test_all_fields_that_differ_are_named_and_many_are_counted(tmp_path):
    begin(tmp_path)
    save(tmp_path)
    data = {"train": {"source": "/data/train.jsonl"}, "format": "text", "systemPrompt": None, "template": "{prompt}!"}
    with pytest.raises(InputError) as raised:
        begin(tmp_path, model={"source": "/other"}, trainer={"lora": {"rank": 2}}, data=data, schedule={"seed": 5})
    assert raised.value.path == "spec.data.format"
    assert ", and spec.schedule.seed is 5, not its default, and 1 more differ;" in raised.value.message


def test_job_that_is_deleted_and_applied_again_resumes(tmp_path):
    begin(tmp_path, **CLAIM)
    first = read_origin(tmp_path)
    save(tmp_path)
    begin(tmp_path, **CLAIM, rollout={"replicas": 3}, schedule={"steps": 99})
    assert read_origin(tmp_path) == first


def test_run_without_a_checkpoint_is_that_of_the_next_job(tmp_path):
    begin(tmp_path)
    begin(tmp_path, model={"source": "hf://org/b"})
    save(tmp_path)
    begin(tmp_path, model={"source": "hf://org/b"})
    with pytest.raises(InputError):
        begin(tmp_path)


def test_checkpoints_without_a_record_are_those_of_the_job_that_finds_them(tmp_path):
    begin(tmp_path)
    save(tmp_path)
    (tmp_path / FILE_ORIGIN).unlink()
    begin(tmp_path, model={"source": "hf://org/b"})
    assert read_origin(tmp_path).fields["spec.model"] == {"source": "hf://org/b"}


def test_damaged_record_is_named(tmp_path):
    begin(tmp_path)
    save(tmp_path)
    (tmp_path / FILE_ORIGIN).write_text("{")
    with pytest.raises(InputError, match=r"spec\.checkpoint: origin\.json in .* is damaged"):
        begin(tmp_path)


def test_change_that_a_resume_may_make_is_recorded_with_its_step(tmp_path):
    begin(tmp_path)
    save(tmp_path)
    begin(tmp_path, rollout={"sampling": {"temperature": 0.5}})
    begin(tmp_path, rollout={"sampling": {"temperature": 0.5}})
    (change,) = read_origin(tmp_path).changes
    assert str(change) == 'after step 2: spec.rollout.sampling is {"temperature": 0.5}; it was its default'
