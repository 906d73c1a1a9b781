"""What names the cache folder, and what is refused before anything is built."""

from pathlib import Path

import pytest

from rljob_cluster import build


def test_the_cache_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.programs_folder() == tmp_path / "rljob" / "cluster" / f"bin-{build.build_digest()}"


def test_the_digest_changes_with_a_pin(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("require a v1")
    (tmp_path / "go.sum").write_text("a v1 h1:x")
    before = build.build_digest(tmp_path)
    assert before == build.build_digest(tmp_path)
    (tmp_path / "go.sum").write_text("a v1 h1:y")
    assert build.build_digest(tmp_path) != before


def test_a_program_that_is_there_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_build", lambda name, folder: pytest.fail(f"built {name}"))
    folder = build.programs_folder()
    folder.mkdir(parents=True)
    (folder / "helm").touch()
    assert build.find_or_build("helm") == folder


def test_an_unknown_program_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(build.BuildError, match=r"no such program: kubeadm; known are etcd"):
        build.find_or_build("kubeadm")
