"""Scratch directories: one per worker, with its home and its /tmp, the only places that a function may write to.

Files from the import stay; files of a request are removed before its answer; all are removed after the worker. The
worker cleans up after requests, within their timeout; the server removes the directory. Standard library only.
"""

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

HOME_VARIABLES = ("HOME", "TMPDIR", "TMP", "TEMP")
_FOLDER = "workers"
_MAX_ENTRIES_COUNTED = 100_000
_MIN_FILE_BYTES = 512
"""Counted for an empty file."""
_CLOCK_TICK_NS = 50_000_000
"""Longer than the resolution of the times of files."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY_PREFIX, _UNLOCKED_PREFIX = "rljob-reward-", ".rljob-reward-"


class _CountedError(Exception):
    """Enough is counted."""


def make_temporary() -> tuple[str, int]:
    """Create a folder for one server, and remove those of killed servers. Return it and the descriptor that locks it.

    Workers of other users must be able to traverse it.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.geteuid():
                os.close(_lock(path))  # fails while its server lives
                remove(path)
    created = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX))
    created.chmod(0o711)
    lock = _lock(created)
    # It has this name only once it is locked: no other server takes it for that of a killed one.
    root = created.with_name(_TEMPORARY_PREFIX + created.name.removeprefix(_UNLOCKED_PREFIX))
    created.rename(root)
    return str(root), lock


def is_temporary(path: str) -> bool:
    """Return whether a server has made this folder."""
    return os.path.basename(path).startswith(_TEMPORARY_PREFIX)


def _lock(path: str | Path) -> int:
    descriptor = os.open(path, _FOLDER_FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


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
    """Create the directory of a worker."""
    path = folder / f"{mark:x}"
    path.mkdir(mode=0o700)
    for each, mode in ((path, 0o700), (Path(home_of(path)), 0o700), (Path(temporary_of(path)), 0o1777)):
        each.mkdir(exist_ok=True)
        each.chmod(mode)
        if uid is not None:
            os.chown(each, uid, uid)
    return path


def home_of(path: str | Path) -> str:
    """Return the home in a worker's directory."""
    return f"{path}/home"


def temporary_of(path: str | Path) -> str:
    """Return what may become /tmp in a worker's directory."""
    return f"{path}/tmp"


def remove(path: str | Path) -> None:
    """Remove a tree, even if its owner has revoked permissions on its folders. What cannot be removed stays."""

    def remove_files(folder: int) -> list[str]:
        with os.scandir(folder) as found:
            entries = list(found)
        for entry in entries:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def remove_folder(parent: int, name: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent)

    _walk(path, remove_files, remove_folder, _open_writable)
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _walk(
    path: str | Path,
    visit: Callable[[int], list[str]],
    leave: Callable[[int, str], None] = lambda parent, name: None,
    open_: Callable[[str | Path, int | None], int] = lambda name, parent: os.open(name, _FOLDER_FLAGS, dir_fd=parent),
) -> None:
    """Visit each folder of a tree, by its descriptor: `visit` returns the subfolders to go into. Without recursion, and
    with one descriptor: a function can nest folders deeper than a stack, or a path, is long."""
    names: list[str] = []
    pending: list[list[str]] = [[]]
    with contextlib.suppress(OSError):
        folder = open_(path, None)
        try:
            pending[0] = visit(folder)
            while pending:
                if not pending[-1]:
                    pending.pop()
                    if names:
                        folder = _step(folder, os.open("..", _FOLDER_FLAGS, dir_fd=folder))
                        leave(folder, names.pop())
                    continue
                name = pending[-1].pop()
                with contextlib.suppress(OSError):  # it is gone, or closed to us
                    folder = _step(folder, open_(name, folder))
                    names.append(name)
                    pending.append([])
                    pending[-1] = visit(folder)
        finally:
            os.close(folder)


def _step(folder: int, other: int) -> int:
    os.close(folder)
    return other


def _open_writable(name: str | Path, parent: int | None) -> int:
    """Open a folder, whose owner may have closed it."""
    found = os.open(name, _FOLDER_FLAGS | os.O_PATH, dir_fd=parent)
    try:
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{found}", stat.S_IRWXU)
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(found)


class ScratchCleaner:
    """Removes what a request leaves in directories: everything that the import did not create, at any depth."""

    def __init__(self, path: str, *others: str, left_out: Collection[str] = ()) -> None:
        """`left_out`: paths of folders at the top that stay, and are not gone into: those for the mounts of a private
        /tmp, which hide them."""
        self._path = path
        self._trees = {root: _Tree(root, left_out) for root in (path, *others)}

    def clean(self) -> None:
        """Undo, too, that a function revoked its own access or changed the directory."""
        for root, tree in self._trees.items():
            tree.clean(root)
        os.chdir(self._path)


class _Tree:
    """A directory as the import left it: its mode, its entries and its subdirectories."""

    def __init__(self, path: str, left_out: Collection[str] = ()) -> None:
        self._mode = os.stat(path).st_mode
        with os.scandir(path) as found:
            entries = list(found)
        self._names = {entry.name for entry in entries}
        folders = [e for e in entries if e.is_dir(follow_symlinks=False) and e.path not in left_out]
        self._subtrees = {folder.name: _Tree(folder.path) for folder in folders}
        self._unchanged_since = 0
        """Time of the last change in ns, if any later one has another time; else 0."""

    def clean(self, path: str) -> None:
        if os.stat(path, follow_symlinks=False).st_ctime_ns == self._unchanged_since:
            self._clean_subtrees(path)  # none was replaced
            return
        # By descriptor: a link that replaced a directory is not followed.
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._clean(descriptor)
        finally:
            os.close(descriptor)

    def _clean_subtrees(self, path: str) -> None:
        for name, subtree in self._subtrees.items():
            with contextlib.suppress(OSError):  # the function removed or replaced it
                subtree.clean(f"{path}/{name}")

    def _clean(self, descriptor: int) -> None:
        path = f"/proc/self/fd/{descriptor}"
        if os.fstat(descriptor).st_mode != self._mode:
            os.chmod(path, stat.S_IMODE(self._mode))
        for name in os.listdir(path):
            if name not in self._names:
                remove_entry(f"{path}/{name}")
        self._clean_subtrees(path)
        changed = os.fstat(descriptor).st_ctime_ns
        self._unchanged_since = changed if time.time_ns() - changed > _CLOCK_TICK_NS else 0


def remove_entry(path: str) -> None:
    """Remove a file, a link or a tree. What cannot be removed stays."""
    if os.path.isdir(path) and not os.path.islink(path):
        remove(path)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def unnamed_bytes(pid: int, *paths: str | Path) -> int:
    """Return the disk usage of files that a process has open on the file systems of `paths` without a name."""
    total = 0
    with contextlib.suppress(OSError):
        devices = {os.stat(path).st_dev for path in paths}
        with os.scandir(f"/proc/{pid}/fd") as descriptors:
            found = [os.stat(entry.path) for entry in descriptors]
        files = {
            s.st_ino: s.st_blocks * 512
            for s in found
            if stat.S_ISREG(s.st_mode) and s.st_dev in devices and not s.st_nlink
        }
        total = sum(files.values())
    return total


def shared_memory_bytes(pid: int, folder: str) -> int:
    """Return what is used of the file system that a process sees at `folder`, with files that have no name."""
    with contextlib.suppress(OSError):
        status = os.statvfs(f"/proc/{pid}/root{folder}")
        return (status.f_blocks - status.f_bfree) * status.f_frsize
    return 0


def entry_bytes(path: str, limit: int) -> int:
    """Return the disk usage of a file or of a tree, as used_bytes() does."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return used_bytes(path, limit) if stat.S_ISDIR(status.st_mode) else status.st_blocks * 512
    return 0


def used_bytes(path: str | Path, limit: int) -> int:
    """Return the disk usage below `path`; stops counting above `limit`, and at too many entries."""
    total = num_entries = 0

    def count(folder: int) -> list[str]:
        nonlocal total, num_entries
        folders = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                num_entries += 1
                status = entry.stat(follow_symlinks=False)
                total += max(status.st_blocks * 512, _MIN_FILE_BYTES)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(entry.name)
                if total > limit or num_entries > _MAX_ENTRIES_COUNTED:
                    raise _CountedError
        return folders

    try:
        _walk(path, count)
    except _CountedError:
        return max(total, limit + 1)
    return total
