"""The archive of a folder, as `tar` reads it."""

from __future__ import annotations

import io
import tarfile

import pytest

from rljob_api.errors import UserError
from rljob_cli.submit.archive import count_bytes, stream
from rljob_cli.submit.sources import LocalSource, read_tree


def read(folder, path):
    return read_tree(LocalSource(("spec", "model", "source"), path, "model", "model"), folder)


@pytest.fixture
def model(tmp_path):
    """A folder with an empty file, a whole block, a long name and one that is not ASCII."""
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "empty").touch()
    (folder / "block").write_bytes(bytes(512))
    (folder / "deep" / ("n" * 150)).write_text("long name")
    (folder / "数学.json").write_text("{}")
    return folder


def test_archive_has_the_announced_size_and_all_files(model, tmp_path):
    tree = read(tmp_path, "model")
    data = b"".join(stream(tree))
    assert len(data) == count_bytes(tree)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
        found = {m.name: (archive.extractfile(m).read(), m.mode) for m in archive}
    assert found == {
        "model/block": (bytes(512), 0o644),
        f"model/deep/{'n' * 150}": (b"long name", 0o644),
        "model/empty": (b"", 0o644),
        "model/数学.json": (b"{}", 0o644),
    }


def test_single_file_has_no_folder(model, tmp_path):
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream(read(tmp_path, "model/block")))), mode="r|") as archive:
        assert archive.getnames() == ["block"]


@pytest.mark.parametrize("now", [b"", b"more than before" * 1000])
def test_file_that_changes_while_it_is_copied_is_an_error(model, tmp_path, now):
    (model / "block").write_bytes(b"before")
    tree = read(tmp_path, "model/block")
    (model / "block").write_bytes(now)
    with pytest.raises(UserError, match="has changed while it was copied"):
        b"".join(stream(tree))
