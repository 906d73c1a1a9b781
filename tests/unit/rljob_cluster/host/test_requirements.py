import os
from collections import namedtuple

import pytest

from rljob_cluster import __main__, machine


@pytest.fixture
def as_root(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machine, "cgroup_controllers", lambda: [tmp_path])
    monkeypatch.setattr(machine.shutil, "which", lambda program: None)
    return tmp_path


def test_a_machine_that_lets_us_make_cgroups_lacks_nothing_and_keeps_no_trace(as_root):
    assert list(machine.find_lacks()) == []
    assert list(as_root.iterdir()) == []


def test_a_user_who_is_not_root_is_told_of_a_cluster_of_their_own(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (lack,) = machine.find_lacks()
    assert "root" in lack
    assert "E2E_CONTEXT" in lack


def test_a_cgroup_that_cannot_be_made_is_told_with_its_place_and_reason(as_root, monkeypatch):
    monkeypatch.setattr(machine, "cgroup_controllers", lambda: [as_root / "none"])
    (lack,) = machine.find_lacks()
    assert str(as_root / "none") in lack
    assert "No such file" in lack


def test_check_says_what_is_lacking_and_ends_with_1(as_root, monkeypatch, capsys):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Usage(10**12, 0, 3 * 10**9))
    monkeypatch.setenv("RLJOB_CLUSTER_DIR", str(as_root / "state"))
    assert __main__.main(["check"]) == 1
    assert "3 GB are free" in capsys.readouterr().err
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Usage(10**12, 0, 10**12))
    assert __main__.main(["check"]) == 0
