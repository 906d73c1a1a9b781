"""Which paths of /tmp stay visible."""

from __future__ import annotations

from pathlib import Path

from rljob_service.worker.sandbox.private_folders import below, outermost


def test_only_existing_paths_below_the_root_are_kept_without_links(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "out").symlink_to("/usr")
    paths = [str(tmp_path / name) for name in ("data", "link", "out", "missing")]
    assert list(below(str(tmp_path), [*paths, str(tmp_path), "/usr"])) == [str(tmp_path / "data")] * 2


def test_paths_below_others_are_left_out() -> None:
    paths = ["/tmp/b/c", "/tmp/a-b", "/tmp/a", "/tmp/a/b", "/tmp/b/c"]
    assert list(outermost(paths)) == ["/tmp/a", "/tmp/a-b", "/tmp/b/c"]
