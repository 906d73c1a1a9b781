"""What names the cache folder, and what is refused before anything is built."""

from pathlib import Path

import pytest

from rljob_cluster.host import go_programs


def test_the_cache_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert go_programs.programs_folder() == tmp_path / "rljob" / "cluster" / f"bin-{go_programs.build_digest()}"


def test_the_digest_changes_with_a_pin(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("require a v1")
    (tmp_path / "go.sum").write_text("a v1 h1:x")
    before = go_programs.build_digest(tmp_path)
    assert before == go_programs.build_digest(tmp_path)
    (tmp_path / "go.sum").write_text("a v1 h1:y")
    assert go_programs.build_digest(tmp_path) != before


def test_a_program_that_is_there_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_build", lambda name, folder: pytest.fail(f"built {name}"))
    folder = go_programs.programs_folder()
    folder.mkdir(parents=True)
    (folder / "helm").touch()
    assert go_programs.find_or_build("helm") == folder


def test_an_unknown_program_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(go_programs.BuildError, match=r"no such program: kubeadm; known are etcd"):
        go_programs.find_or_build("kubeadm")
