"""Scratch directories: files of requests are removed, files of the import stay, nothing outside changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rljob_reward.worker import scratch


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
