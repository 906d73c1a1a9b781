from pathlib import Path

import pytest

from rljob_cluster.host import cgroups


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "cgroup.procs").touch()


def test_hybrid_mode_has_v1_controllers_and_an_extra_v2_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_CGROUPS", tmp_path)
    make(tmp_path, "cpu", "memory", "unified", "memory/rljob-reward", "unified/rljob-reward")
    assert cgroups.is_hybrid()
    assert [path.name for path in cgroups.cgroup_controllers()] == ["cpu", "memory"]
    found = {str(path.relative_to(tmp_path)) for path in cgroups.find_cgroups("rljob-reward")}
    assert found == {"memory/rljob-reward", "unified/rljob-reward"}, "cleanup removes both"


def test_v2_has_one_hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_CGROUPS", tmp_path)
    (tmp_path / "cgroup.controllers").touch()
    make(tmp_path, "rljob-reward")
    assert not cgroups.is_hybrid()
    assert list(cgroups.cgroup_controllers()) == [tmp_path]
    assert cgroups.find_cgroups("rljob-reward") == [tmp_path / "rljob-reward"]
