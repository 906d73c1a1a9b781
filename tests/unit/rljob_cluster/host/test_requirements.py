import os
from collections import namedtuple

import pytest

from rljob_cluster import __main__
from rljob_cluster.host import requirements
from rljob_cluster.host.requirements import find_missing_requirements


@pytest.fixture
def root_user(monkeypatch, tmp_path):
    """A root user without `ip`, on a machine whose only cgroup hierarchy is the returned folder."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(requirements, "cgroup_controllers", lambda: [tmp_path])
    monkeypatch.setattr(requirements.shutil, "which", lambda program: None)
    return tmp_path


def test_capable_machine_misses_nothing_and_keeps_no_trace(root_user):
    assert list(find_missing_requirements()) == []
    assert list(root_user.iterdir()) == []


def test_user_without_root_is_pointed_to_an_existing_cluster(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (missing,) = find_missing_requirements()
    assert "root" in missing
    assert "E2E_CONTEXT" in missing


def test_failed_cgroup_is_reported_with_path_and_reason(root_user, monkeypatch):
    monkeypatch.setattr(requirements, "cgroup_controllers", lambda: [root_user / "none"])
    (missing,) = find_missing_requirements()
    assert str(root_user / "none") in missing
    assert "No such file" in missing


def test_check_reports_what_is_missing_and_exits_with_1(root_user, monkeypatch, capsys):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(requirements.shutil, "disk_usage", lambda folder: Usage(10**12, 0, 3 * 10**9))
    monkeypatch.setenv("RLJOB_CLUSTER_DIR", str(root_user / "state"))
    assert __main__.main(["check"]) == 1
    assert "3 GB are free" in capsys.readouterr().err
    monkeypatch.setattr(requirements.shutil, "disk_usage", lambda folder: Usage(10**12, 0, 10**12))
    assert __main__.main(["check"]) == 0
