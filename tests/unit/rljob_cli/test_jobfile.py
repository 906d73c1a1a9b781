"""Reading a job file: overrides and paths."""

from __future__ import annotations

import pytest

from rljob_api.errors import UserError
from rljob_cli.jobfile import apply_override, load, parse_path

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  model: {source: ./model}
  data:
    train: {source: train.jsonl}
  rewards:
  - name: r
    function: {file: reward.py}
  algorithm:
    optimizer: {maxGradNorm: null}
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def test_relative_paths_begin_at_the_job_file(path):
    spec = load(path).job.spec
    assert spec.model.source == str(path.parent / "model")
    assert spec.data.train.source == str(path.parent / "train.jsonl")
    assert spec.rewards[0].function.file == str(path.parent / "reward.py")
    assert spec.data.train.data_source == "train.jsonl", "what functions are told does not depend on the folder"


def test_an_override_is_yaml_and_creates_what_is_not_there(path):
    overrides = ["spec.schedule.steps=3", "spec.rewards[0].slots=2", "spec.algorithm.optimizer.learningRate=1e-6"]
    spec = load(path, overrides).job.spec
    assert (spec.schedule.steps, spec.rewards[0].slots, spec.algorithm.optimizer.learning_rate) == (3, 2, 1e-6)
    assert spec.algorithm.optimizer.max_grad_norm is None, "an explicit null stays one"


@pytest.mark.parametrize("override", ["spec.schedule.steps", "=3", "spec.rewards[7].slots=1", "spec.model.source.x=1"])
def test_an_override_of_nothing_is_a_users_mistake(path, override):
    with pytest.raises(UserError, match="--set"):
        load(path, [override])


def test_a_wrong_override_is_told_like_a_mistake_in_the_file(path):
    with pytest.raises(UserError, match=r"job\.yaml:\d+: spec\.schedule\.steps must be at least 1, got 0"):
        load(path, ["spec.schedule.steps=0"])


def test_paths_are_read_as_messages_show_them():
    assert parse_path("spec.rewards[0].name") == ("spec", "rewards", 0, "name")
    data = {"a": [{"b": 1}]}
    apply_override(data, "a[0].b=[2, 3]")
    assert data == {"a": [{"b": [2, 3]}]}
