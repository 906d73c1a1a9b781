"""Files of Pods, as a newer operator may write them, and changes of the job's file while the job runs."""

import logging

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.services.reward import Reward
from rljob_api.read.pod_files import JobFile, load_job_file
from rljob_api.read.unknown_fields import drop_unknown_fields
from tests.support.job_simulation import describe_job

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


class Volume:
    """A ConfigMap's volume: job.yaml points through ..data, which the kubelet swaps for another folder."""

    def __init__(self, folder):
        self.folder, self.num = folder, 0
        (folder / "job.yaml").symlink_to("..data/job.yaml")

    def publish(self, text):
        self.num += 1
        data = self.folder / f"..{self.num}"
        data.mkdir()
        (data / "job.yaml").write_text(text)
        (self.folder / "..data_tmp").symlink_to(data.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")


@pytest.fixture
def volume(tmp_path):
    volume = Volume(tmp_path)
    volume.publish(describe_job(3))
    return volume


def open_file(path):
    return JobFile(path, load_job_file(path).spec)


def test_swapped_link_is_detected(volume):
    file = open_file(volume.folder / "job.yaml")
    assert file.read_spec().schedule.steps == 3
    volume.publish(describe_job(7))
    assert file.read_spec().schedule.steps == 7


def test_renamed_file_is_detected(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(describe_job(3))
    file = open_file(path)
    assert file.read_spec().schedule.steps == 3
    (tmp_path / "new").write_text(describe_job(4))
    (tmp_path / "new").replace(path)
    assert file.read_spec().schedule.steps == 4


@pytest.mark.parametrize("text", ["", "spec: [", describe_job(0)])
def test_unusable_file_changes_nothing(volume, text):
    file = open_file(volume.folder / "job.yaml")
    volume.publish(text)
    assert file.read_spec().schedule.steps == 3
    volume.publish(describe_job(5))
    assert file.read_spec().schedule.steps == 5


def test_missing_file_changes_nothing(volume):
    file = open_file(volume.folder / "job.yaml")
    (volume.folder / "..data").unlink()
    assert file.read_spec().schedule.steps == 3
