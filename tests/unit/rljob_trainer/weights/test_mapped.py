"""Files that stay mapped while they are written again and again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_trainer.weights.mapped import MappedFile


def test_a_full_disk_is_an_error_before_the_first_write_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(UserError, match=r"cannot reserve 3.0 GiB for a weight file: No space left on device; raise"):
        MappedFile(tmp_path / "weights", num_bytes=3 << 30)
    assert not list(tmp_path.iterdir())


def test_all_pages_of_a_new_file_are_reserved(tmp_path: Path) -> None:
    file = MappedFile(tmp_path / "weights", num_bytes=1 << 20)
    assert os.stat(tmp_path / "weights").st_blocks * 512 >= 1 << 20
    file.close()
