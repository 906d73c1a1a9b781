"""Scratch directories: files of requests are removed, files of the import stay, nothing outside changes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rljob_service.worker.process import scratch


def test_cleaning_removes_only_entries_created_after_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").touch()
    cleaner = scratch.ScratchCleaner(str(tmp_path))
    (tmp_path / "answer.py").touch()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "model")
    os.chmod(tmp_path / "deep", 0)
    os.chdir(tmp_path / "model")
    cleaner.clean()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "weights"]
    assert Path.cwd() == tmp_path


def test_folder_of_the_import_loses_only_what_requests_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache" / "deep").mkdir(parents=True)
    (tmp_path / "cache" / "index").touch()
    cleaner = scratch.ScratchCleaner(str(tmp_path))
    for _ in range(2):
        (tmp_path / "cache" / "deep" / "left").mkdir()
        os.chmod(tmp_path / "cache" / "deep", 0o500)
        cleaner.clean()
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["cache", "deep", "index"]


def test_cleaning_does_not_follow_a_link_that_replaced_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, own = tmp_path / "outside", tmp_path / "own"
    (own / "cache").mkdir(parents=True)
    outside.mkdir()
    (outside / "precious").touch()
    monkeypatch.chdir(own)
    cleaner = scratch.ScratchCleaner(str(own))
    (own / "cache").rmdir()
    (own / "cache").symlink_to(outside)
    cleaner.clean()
    assert (outside / "precious").exists()


def test_folders_of_mounts_stay_and_are_not_gone_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    for folder in (home, temporary / "packages" / "deep", temporary / "cache" / "packages"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(home)
    cleaner = scratch.ScratchCleaner(str(home), str(temporary), left_out=[f"{temporary}/packages"])
    for folder in ("packages/deep", "cache/packages", "."):
        (temporary / folder / "left").touch()
    cleaner.clean()
    left = [path.relative_to(temporary).as_posix() for path in temporary.rglob("left")]
    assert left == ["packages/deep/left"], "only below the top: a folder of the import may have the same name"


def test_unchanged_folder_is_not_read_again_and_a_change_is_noticed(tmp_path: Path) -> None:
    tree = scratch._Tree(str(tmp_path))
    (tmp_path / "first").touch()
    tree.clean(str(tmp_path))
    tree._unchanged_since = os.stat(tmp_path).st_ctime_ns  # as after the resolution of the clock
    (tmp_path / "second").touch()
    tree.clean(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_folder_within_an_unchanged_folder_is_cleaned_without_following_links(tmp_path: Path) -> None:
    own, outside = tmp_path / "own", tmp_path / "outside"
    (own / "cache").mkdir(parents=True)
    outside.mkdir()
    (outside / "precious").touch()
    tree = scratch._Tree(str(own))
    tree._unchanged_since = own.stat().st_ctime_ns
    (own / "cache" / "left").touch()
    tree.clean(str(own))
    assert not (own / "cache" / "left").exists()
    (own / "cache").rmdir()
    (own / "cache").symlink_to(outside)
    tree.clean(str(own))
    assert (outside / "precious").exists()


def test_folders_of_killed_servers_are_removed_and_those_of_living_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living, lock = scratch.make_temporary()
    _, killed_lock = scratch.make_temporary()
    os.close(killed_lock)
    new, new_lock = scratch.make_temporary()
    assert sorted(map(str, tmp_path.iterdir())) == sorted([living, new])
    os.close(lock)
    os.close(new_lock)


def test_unnamed_file_counts_while_it_is_open(tmp_path: Path) -> None:
    others = scratch.unnamed_bytes(os.getpid(), tmp_path)  # pytest and other tests keep unnamed files open
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(b"x" * 10_000_000)
        file.flush()
        assert scratch.unnamed_bytes(os.getpid(), tmp_path) >= others + 10_000_000
    assert scratch.unnamed_bytes(os.getpid(), tmp_path) < others + 10_000_000


def test_preparing_empties_the_folder_and_keeps_the_mode_of_its_parent(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    for _ in range(2):
        folder = scratch.prepare(tmp_path)
        assert list(folder.iterdir()) == []
        (folder / "left").mkdir()
    assert oct(tmp_path.stat().st_mode & 0o777) == "0o711"


def test_used_bytes_counts_nested_and_empty_files(tmp_path: Path) -> None:
    assert scratch.used_bytes(tmp_path, 1 << 20) == 0
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 10_000)
    assert 10_000 <= scratch.used_bytes(tmp_path, 1 << 20) < 1 << 20
    assert scratch.used_bytes(tmp_path, 5_000) > 5_000
    assert scratch.used_bytes(tmp_path / "gone", 1) == 0


def nest(folder: Path, depth: int) -> int:
    """Create folders within each other, and return the descriptor of the innermost: its path is too long to be used."""
    current = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=current)
        inner = os.open("d", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = inner
    return current


def test_folders_nested_deeper_than_a_path_is_long_are_counted_and_removed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    innermost = nest(root, 3_000)
    file = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=innermost)
    os.write(file, bytes(1 << 20))
    os.close(file)
    os.close(innermost)
    assert scratch.used_bytes(root, 1 << 40) > 1 << 20
    scratch.remove(root)
    assert not root.exists()


def test_tree_without_permissions_is_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    root = tmp_path / "root"
    (root / "closed" / "inner").mkdir(parents=True)
    (root / "closed" / "inner" / "file").touch()
    (root / "link").symlink_to(kept)
    for folder in (root / "closed" / "inner", root / "closed", root):
        folder.chmod(0)
    scratch.remove(root)
    assert not root.exists()
    assert (kept / "file").exists()
