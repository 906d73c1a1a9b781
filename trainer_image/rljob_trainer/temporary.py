"""Temporary folders and files of a process: removed when it ends, and after a kill by the next process of its user.

Each is locked by its process, whatever the process's id and container. Invariant: nothing of a living process is
removed.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path


class TemporaryFolder(contextlib.AbstractContextManager[str]):
    """Exists until `cleanup`, the end of the context, or the end of the process."""

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        """Create PARENT/rljob-KIND-..., private to this user, and remove those of killed processes. Paths of sockets
        are limited to 107 bytes, so this one is short."""
        parent = parent or Path(tempfile.gettempdir())
        remove_leftovers(kind, parent)
        created = Path(tempfile.mkdtemp(prefix=f".{_prefix(kind)}", dir=parent))
        descriptor = os.open(created, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = publish_locked(created, descriptor)
        self.name = str(self.path)
        self._remove = weakref.finalize(self, _remove, self.path, descriptor, os.getpid())

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove it, as far as that is possible. Idempotent."""
        self._remove()


def create_file(kind: str, parent: Path) -> tuple[Path, int]:
    """Create PARENT/rljob-KIND-..., and remove those of killed processes. Return it with its descriptor, which locks it
    until it is closed. Raise OSError."""
    remove_leftovers(kind, parent)
    descriptor, name = tempfile.mkstemp(prefix=f".{_prefix(kind)}", dir=parent)
    return publish_locked(Path(name), descriptor), descriptor


def publish_locked(hidden: Path, descriptor: int) -> Path:
    """Lock what has just been created, and only then give it a name that others look for."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))


def remove_leftovers(kind: str, parent: Path) -> None:
    """Remove what killed processes of this user have left."""
    for path in parent.glob(f"{_prefix(kind)}*"):
        with contextlib.suppress(OSError):  # its process lives, or another one removes it
            if path.lstat().st_uid == os.geteuid():
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process also comes here at its end
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _prefix(kind: str) -> str:
    return f"rljob-{kind}-"
