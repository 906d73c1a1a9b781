"""What the doctor asks for: its arguments, or the job of its Pod."""

import pytest

from rljob_trainer.doctor import main as doctor
from rljob_trainer.doctor.report import Check

JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: t}
spec:
  model: {source: /m}
  data: {train: {source: /t}}
  rewards: [{name: r, function: {inline: x}}]
  trainer: {gpusPerReplica: 4}
  rollout: {gpusPerReplica: 2}
"""


@pytest.mark.parametrize(
    ("arguments", "has_job", "asked"),
    [
        ([], False, (None, "--gpus")),
        (["--gpus", "3"], True, (3, "--gpus")),
        ([], True, (4, "spec.trainer.gpusPerReplica")),
        (["--role", "rollout"], True, (2, "spec.rollout.gpusPerReplica")),
    ],
)
def test_gpus_are_those_of_the_arguments_or_of_the_pods_job(monkeypatch, tmp_path, capsys, arguments, has_job, asked):
    calls = []

    def check_compute(num_gpus, field, ranks):
        calls.append((num_gpus, field))
        return [Check("devices", "failed", "0 GPUs")]

    monkeypatch.setattr(doctor, "check_compute", check_compute)
    monkeypatch.delenv("RLJOB_JOB_FILE", raising=False)
    if has_job:
        (tmp_path / "job.yaml").write_text(JOB)
        monkeypatch.setenv("RLJOB_JOB_FILE", str(tmp_path / "job.yaml"))
    assert doctor.main(arguments) == 1
    assert calls == [asked]
    assert "devices" in capsys.readouterr().out
