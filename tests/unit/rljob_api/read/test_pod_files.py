"""Files of Pods, as a newer operator may write them."""

import logging

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.services.reward import Reward
from rljob_api.read.pod_files import load_job_file
from rljob_api.read.unknown_fields import drop_unknown_fields

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {source: /models/tiny, quantum: {bits: 2}}
  data: {train: {source: /data/train.jsonl}}
  rewards:
  - {name: correct, function: {inline: x}, later: 1}
  flux: 7
  schedule: {steps: 3}
"""


def test_fields_of_a_newer_operator_are_left_out_with_a_warning(tmp_path, caplog):
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    with caplog.at_level(logging.WARNING):
        job = load_job_file(file)
    assert (job.spec.schedule.steps, job.spec.rewards[0].name) == (3, "correct")
    assert all(field in caplog.text for field in ("spec.flux", "spec.model.quantum", "spec.rewards[0].later"))


def test_running_job_keeps_a_value_that_is_no_longer_accepted(tmp_path, caplog):
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace("flux: 7", "rollout: {sampling: {topP: 0.9}}"))
    assert load_job_file(file).spec.rollout.sampling.top_p == 0.9
    assert "spec.rollout.sampling.topP must be 1 for training" in caplog.text


def test_other_errors_are_reported_with_their_line(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace("steps: 3", "steps: -3"))
    with pytest.raises(UserError, match=r"job\.yaml:10: spec\.schedule\.steps must be"):
        load_job_file(file)


@pytest.mark.parametrize("text", ["", "a: [", "- 1", f"{JOB}---\n{JOB}"])
def test_file_that_is_not_one_job_is_an_error(tmp_path, text):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(UserError):
        load_job_file(file)


def test_known_data_is_unchanged(caplog):
    data = {"name": "correct", "function": {"inline": "x"}}
    assert drop_unknown_fields(Reward, data, "service.yaml") is data
    assert not caplog.text
