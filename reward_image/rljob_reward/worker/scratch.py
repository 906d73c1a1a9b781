"""Scratch directories: one per worker, the only place that a function may write to.

Files from the import stay; files of a request are removed before its answer; all are removed after the worker. The
worker cleans up after requests, within their timeout; the server removes the directory. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

_FOLDER = "workers"
_MAX_ENTRIES_COUNTED = 100_000
_MIN_FILE_BYTES = 512
"""Counted for an empty file."""


def prepare(root: Path) -> Path:
    """Create the folder for all workers' directories, and remove the remains of an earlier server."""
    folder = root / _FOLDER
    remove(folder)
    folder.mkdir(parents=True)
    folder.chmod(0o711)
    return folder


def write_module(folder: Path, name: str, source: str) -> Path:
    """Write a module that all workers can import, and return its directory."""
    path = folder / "modules"
    path.mkdir()
    path.chmod(0o755)
    file = path / f"{name}.py"
    file.write_text(source, encoding="utf-8")
    file.chmod(0o644)
    return path


def make(folder: Path, mark: int, uid: int | None) -> Path:
    path = folder / f"{mark:x}"
    path.mkdir(mode=0o700)
    if uid is not None:
        os.chown(path, uid, uid)
    return path


def remove(path: str | Path) -> None:
    """Remove a tree, even if its owner has revoked permissions on its folders. What cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)
    _make_writable(os.fspath(path))
    for folder, subfolders, _ in os.walk(path):  # lists a folder before it descends into its subfolders
        for name in subfolders:
            _make_writable(os.path.join(folder, name))
    shutil.rmtree(path, ignore_errors=True)


def _make_writable(folder: str) -> None:
    with contextlib.suppress(OSError):
        if not os.path.islink(folder):
            os.chmod(folder, stat.S_IRWXU)


class ScratchCleaner:
    def __init__(self, path: str) -> None:
        self._path = path
        self._kept = frozenset(os.listdir(path))

    def clean(self) -> None:
        """Undo, too, that a function revoked its own access or changed the directory."""
        os.chmod(self._path, stat.S_IRWXU)
        for entry in os.listdir(self._path):
            if entry not in self._kept:
                _remove_entry(os.path.join(self._path, entry))
        os.chdir(self._path)


def _remove_entry(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        remove(path)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def used_bytes(path: str | Path, limit: int) -> int:
    """Return the disk usage below `path`; stops counting above `limit`, and at too many entries."""
    total, num_entries, folders = 0, 0, [os.fspath(path)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                num_entries += 1
                status = entry.stat(follow_symlinks=False)
                total += max(status.st_blocks * 512, _MIN_FILE_BYTES)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(entry.path)
                if total > limit or num_entries > _MAX_ENTRIES_COUNTED:
                    return max(total, limit + 1)
    return total
