"""Whether a job may resume in the folder of an earlier run."""

import pytest

from rljob_api.manifest.job import RLJob
from rljob_cli.run import runfolder


def build_job(data=None, **schedule):
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t.jsonl"}} | (data or {}),
        "rewards": [{"name": "r", "function": {"inline": "def reward(): ..."}}],
        "schedule": schedule,
    }
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec}
    )


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"steps": 9}, []),
        ({"maxStepsWithoutSignal": 0}, []),
        ({"seed": 1}, ["spec.schedule"]),
        ({"data": {"maxPromptTokens": 64}}, []),
        ({"data": {"format": "text"}}, ["spec.data"]),
    ],
)
def test_only_mutable_fields_may_change_before_a_resume(tmp_path, change, refused):
    runfolder.prepare(tmp_path, build_job())
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "COMPLETE").touch()
    assert runfolder.changed_fields(tmp_path, build_job(**change)) == refused
