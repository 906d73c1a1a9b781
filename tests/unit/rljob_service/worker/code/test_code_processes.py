"""What code of the policy may read of a folder that has files for all users and for some."""

from __future__ import annotations

from pathlib import Path

from rljob_service.worker.code.code_processes import find_public


def write(path: Path, mode: int = 0o644) -> str:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.chmod(mode)
    return str(path)


def test_files_of_some_users_and_links_are_left_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    hosts, host_key = write(tmp_path / "hosts"), write(tmp_path / "ssh/key.pub")
    write(tmp_path / "shadow", 0o640)
    write(tmp_path / "ssh/key", 0o600)
    write(tmp_path / "private/key")
    (tmp_path / "private").chmod(0o711)
    write(tmp_path / "fonts/a")
    (tmp_path / "link").symlink_to(tmp_path / "shadow")
    assert sorted(find_public(str(tmp_path))) == sorted([hosts, host_key, str(tmp_path / "fonts")])


def test_a_folder_that_all_may_read_is_one_path(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write(tmp_path / "a/b")
    write(tmp_path / "c")
    assert find_public(str(tmp_path)) == [str(tmp_path)]
