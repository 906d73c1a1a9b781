"""`rljob submit --dry-run`, which contacts no cluster."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from rljob_api.errors import UserError
from rljob_cli.main import app
from rljob_cli.submit import command
from rljob_cli.submit.plan import Submission
from tests.support.job_simulation import make_job


def submit(*arguments):
    done = CliRunner().invoke(app, ["submit", *map(str, arguments), "--dry-run", "--kubeconfig", "none"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done


@pytest.fixture
def scaffold(tmp_path):
    CliRunner().invoke(app, ["init", str(tmp_path / "sums")])
    return tmp_path / "sums" / "rljob.yaml"


def test_dry_run_prints_the_objects_of_the_scaffold_as_yaml(scaffold):
    config_map, job = yaml.safe_load_all(submit(scaffold, "-n", "team").stdout)
    assert [config_map["kind"], job["kind"], job["metadata"]["namespace"]] == ["ConfigMap", "RLJob", "team"]
    assert config_map["data"]["correct.reward.py"] == (scaffold.parent / "reward.py").read_text()


def test_dry_run_prints_one_json_list_and_applies_overrides(scaffold):
    done = submit(scaffold, "-o", "json", "--set", "spec.schedule.steps=3")
    assert json.loads(done.stdout)["items"][-1]["spec"]["schedule"]["steps"] == 3


def test_missing_files_are_reported_with_their_lines_all_at_once(scaffold):
    (scaffold.parent / "reward.py").unlink()
    (scaffold.parent / "data" / "train.jsonl").unlink()
    done = submit(scaffold)
    assert done.exit_code == 2
    first, second = done.stderr.splitlines()
    lines = scaffold.read_text().splitlines()
    for line, field, text in ((first, "spec.data.train.source", "train"), (second, "rewards[0].function.file", "rew")):
        number = int(line.removeprefix(f"{scaffold}:").partition(":")[0])
        assert field in line
        assert "not found" in line
        assert text in lines[number - 1]


def test_file_with_a_reward_model_is_submitted_as_a_whole(scaffold):
    model = """\
---
apiVersion: rljob.dev/v1alpha1
kind: RewardModel
metadata: {name: shared}
spec: {function: {file: reward.py}}
"""
    scaffold.write_text(scaffold.read_text() + model)
    objects = list(yaml.safe_load_all(submit(scaffold).stdout))
    assert [m["kind"] for m in objects] == ["ConfigMap", "RewardModel", "RLJob"]
    assert {*objects[0]["data"]} >= {"correct.reward.py", "shared.reward.py"}


def test_paths_in_pods_and_objects_of_the_cluster_need_not_be_here(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("""\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {source: /models/x}
  data: {train: {source: "pvc://rows/train.jsonl"}}
  trainer: {gpusPerReplica: 8}
  rewards:
  - name: a
    function: {configMapKeyRef: {name: code, key: reward.py}}
  - name: b
    function: {file: /opt/reward.py}
  - name: c
    rewardModelRef: {name: shared}
""")
    [printed] = yaml.safe_load_all(submit(job).stdout)
    assert printed["spec"] == yaml.safe_load(job.read_text())["spec"]


def test_logs_are_not_followed_where_stdout_is_for_the_result(scaffold):
    done = submit(scaffold, "--follow", "-o", "yaml")
    assert (done.exit_code, done.stderr) == (2, "--follow prints logs; with -o yaml pass --wait\n")


def test_job_whose_files_nothing_keeps_is_told_so_at_once(scaffold):
    claim = "spec.checkpoint.persistentVolumeClaim"
    told = f"warning: {scaffold}: {claim} is not set: checkpoints, metrics and the exported model are deleted"
    assert told in submit(scaffold).stderr
    for kept in (f"{claim}.claimName=files", "spec.checkpoint.storage=s3://bucket/runs"):
        assert told not in submit(scaffold, "--set", kept).stderr


class StoredJobs:
    """A cluster with these RLJobs."""

    def __init__(self, **jobs):
        self._jobs = jobs

    async def find(self, resource, name):
        return self._jobs.get(name)


async def test_job_that_has_started_may_be_submitted_again_without_the_job_of_its_model():
    submission = Submission(make_job(model={"source": "job://first"}).to_manifest(), [])
    name = submission.job["metadata"]["name"]
    stored = {"status": {"startModel": {"job": "first", "claim": "runs"}}}
    assert await command._find_start(StoredJobs(**{name: stored}), submission, None) == "runs"
    for other in ({}, {"status": {"startModel": {"job": "second", "claim": "runs"}}}):
        with pytest.raises(UserError, match="needs RLJob first, which does not exist"):
            await command._find_start(StoredJobs(**{name: other}), submission, None)
