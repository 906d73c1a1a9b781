"""The head's environment variables, and changes of the job's file while the job runs."""

from pathlib import Path

import pytest
import yaml

from rljob_api.errors import UserError
from rljob_api.wire.redaction import HIDDEN
from rljob_trainer.head.environment import Environment, JobFile, read_environment


def manifest(steps, name="job"):
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t.jsonl"}},
        "rewards": [{"name": "r", "function": {"inline": "def reward(): ..."}}],
        "schedule": {"steps": steps},
    }
    return yaml.safe_dump(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": spec}
    )


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
    volume.publish(manifest(3))
    return volume


def test_file_that_others_may_read_has_no_secrets(volume):
    job = yaml.safe_load(manifest(3))
    job["spec"]["head"] = {"env": {"JUDGE_TOKEN": "correct-horse"}}
    volume.publish(yaml.safe_dump(job))
    environment = Environment(None, volume.folder / "job.yaml", Path(), "", "", "", {})
    shown = yaml.safe_load(environment.shown_job_file.read_text())
    assert shown["spec"].pop("head") == {"env": {"JUDGE_TOKEN": HIDDEN}}
    assert shown == yaml.safe_load(manifest(3))


def test_swapped_link_is_detected(volume):
    file = JobFile(volume.folder / "job.yaml")
    assert file.read_spec().schedule.steps == 3
    volume.publish(manifest(7))
    assert file.read_spec().schedule.steps == 7


def test_renamed_file_is_detected(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(manifest(3))
    file = JobFile(path)
    assert file.read_spec().schedule.steps == 3
    (tmp_path / "new").write_text(manifest(4))
    (tmp_path / "new").replace(path)
    assert file.read_spec().schedule.steps == 4


@pytest.mark.parametrize("text", ["", "spec: [", manifest(0)])
def test_unusable_file_changes_nothing(volume, text):
    file = JobFile(volume.folder / "job.yaml")
    file.read_spec()
    volume.publish(text)
    assert file.read_spec().schedule.steps == 3
    volume.publish(manifest(5))
    assert file.read_spec().schedule.steps == 5


def test_missing_file_changes_nothing(volume):
    file = JobFile(volume.folder / "job.yaml")
    file.read_spec()
    (volume.folder / "..data").unlink()
    assert file.read_spec().schedule.steps == 3


def test_missing_variables_are_listed():
    with pytest.raises(UserError, match=r"not set: RLJOB_RUN_DIR.*RLJOB_REWARD_SERVICES"):
        read_environment({"RLJOB_JOB_FILE": "/x"})


def test_step_of_another_run_is_replaced_by_its_model(volume):
    variables = {
        "RLJOB_JOB_FILE": str(volume.folder / "job.yaml"),
        "RLJOB_RUN_DIR": "/run",
        "RLJOB_POD_IP": "127.0.0.1",
        "RLJOB_MODEL": "/mnt/pvc/runs/sums",
        "RLJOB_TRAIN_DATA": "/t.jsonl",
        "RLJOB_TOKEN": "t",
        "RLJOB_ROLLOUT_SERVICE": "rollout",
        "RLJOB_REWARD_SERVICES": "{}",
    }
    assert read_environment(variables).model_step == ""
    environment = read_environment(variables | {"RLJOB_MODEL_STEP": "20"})
    assert (environment.model, environment.model_step) == ("/mnt/pvc/runs/sums", "20")
    found = environment.with_sources({"spec.model.source": "/mnt/pvc/runs/sums/export"})
    assert (found.model, found.model_step, found.train_data) == ("/mnt/pvc/runs/sums/export", "", ("/t.jsonl",))
