"""The head's environment variables."""

from pathlib import Path

import pytest
import yaml

from rljob_api.errors import UserError
from rljob_api.wire.redaction import HIDDEN
from rljob_trainer.head.environment import Environment, read_environment
from tests.support.job_simulation import describe_job


def test_file_that_others_may_read_has_no_secrets(tmp_path):
    job = yaml.safe_load(describe_job(3))
    job["spec"]["head"] = {"env": {"JUDGE_TOKEN": "correct-horse"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    environment = Environment(None, tmp_path / "job.yaml", Path(), "", "", "", {})
    shown = yaml.safe_load(environment.shown_job_file.read_text())
    assert shown["spec"].pop("head") == {"env": {"JUDGE_TOKEN": HIDDEN}}
    assert shown == yaml.safe_load(describe_job(3))


def test_missing_variables_are_listed():
    with pytest.raises(UserError, match=r"not set: RLJOB_RUN_DIR.*RLJOB_REWARD_SERVICES"):
        read_environment({"RLJOB_JOB_FILE": "/x"})


def test_step_of_another_run_is_replaced_by_its_model(tmp_path):
    (tmp_path / "job.yaml").write_text(describe_job(3))
    variables = {
        "RLJOB_JOB_FILE": str(tmp_path / "job.yaml"),
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
