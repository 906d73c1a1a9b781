"""Which run a name means: one here, or a job in the cluster."""

from __future__ import annotations

import pytest

from rljob_api.errors import UserError
from rljob_cli.options import Target
from rljob_cli.run import runfolder
from rljob_cli.trajectories.log import find_here, find_run


def test_name_means_a_job_where_there_is_a_cluster_unless_the_run_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    run = tmp_path / "runs/sums"
    run.mkdir(parents=True)
    (run / "job.yaml").touch()
    assert find_here("sums", Target()) == run
    assert find_here("sums", Target(namespace="research")) is None
    monkeypatch.setenv("KUBECONFIG", "/k")
    assert find_here("sums", Target()) is None
    assert find_here("runs/sums", Target()) == run
    monkeypatch.setattr(runfolder, "is_in_use", lambda folder: True)
    assert find_here("sums", Target()) == run


def test_a_run_that_does_not_exist_is_answered_with_the_nearest_name(tmp_path):
    (tmp_path / "sums").mkdir()
    with pytest.raises(UserError, match=r"sms: run not found; did you mean sums\?; pass its folder"):
        find_run("sms", tmp_path)
