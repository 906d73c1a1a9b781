"""Which files of a shared folder are removed, and when."""

from __future__ import annotations

from pathlib import Path

from rljob_service.pool.shared_files import SharedFolder, count_shares


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_of_a_request_is_removed_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    shared = SharedFolder(str(tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    shared.observe(["request"])
    shared.end("request")
    assert names(tmp_path) == ["before"]


def test_file_stays_while_a_request_runs_that_may_have_created_it(tmp_path: Path) -> None:
    shared = SharedFolder(str(tmp_path))
    (tmp_path / "first").touch()
    shared.observe(["a", "b"])
    shared.end("a")
    (tmp_path / "second").touch()
    shared.observe(["b", "c"])
    assert names(tmp_path) == ["first", "second"]
    shared.end("b")
    assert names(tmp_path) == ["second"]
    shared.end("c")
    assert names(tmp_path) == []


def test_file_that_its_creator_removed_is_forgotten_and_a_new_one_of_its_name_is_new(tmp_path: Path) -> None:
    shared = SharedFolder(str(tmp_path))
    (tmp_path / "lock").touch()
    shared.observe(["a"])
    (tmp_path / "lock").unlink()
    (tmp_path / "other").touch()  # takes the inode, so that the new file has another
    (tmp_path / "lock").touch()
    shared.observe(["b"])
    shared.end("a")
    assert names(tmp_path) == ["lock", "other"]
    shared.end("b")
    assert names(tmp_path) == []


def test_missing_folder_has_no_files(tmp_path: Path) -> None:
    shared = SharedFolder(str(tmp_path / "none"))
    shared.observe(["a"])
    shared.end("a")


def test_file_counts_in_equal_parts_against_the_limits_of_its_possible_creators(tmp_path: Path) -> None:
    shared = SharedFolder(str(tmp_path))
    (tmp_path / "of-both").write_bytes(b"x" * 80_000)
    shared.observe(["a", "b"])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x" * 40_000)
    shared.observe(["b"])
    counted = count_shares(shared.find_shares(), 1 << 30)
    assert 40_000 <= counted["a"] < 50_000
    assert 80_000 <= counted["b"] < 100_000


def test_folder_whose_file_system_is_bounded_counts_against_no_limit(tmp_path: Path) -> None:
    shared = SharedFolder(str(tmp_path), is_limited=True)
    (tmp_path / "file").touch()
    shared.observe(["a"])
    assert shared.find_shares() == []
