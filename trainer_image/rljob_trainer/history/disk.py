"""Writes to the run's folder, which survive a crash of the process or the node, and wait while its volume is full or
does not work.

Owns which errors are of the volume, and what a user does about them. Leaves to each write that it may be repeated.
Invariant: a write that fails for lack of space is neither lost nor done twice.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from rljob_api.errors import TransientError
from rljob_api.run.folder import complete_checkpoints
from rljob_trainer.concurrency import run_in_thread
from rljob_trainer.outages import Outages, wait_out

_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_AWAY_ERRORS = (*_FULL_ERRORS, errno.EIO, errno.ESTALE, errno.EROFS)
"""Full, over a quota, or a network volume that does not work at the moment."""
_REMEDY = (
    "free space on the volume, such as checkpoints and exports of earlier runs, or enlarge it; lower "
    "spec.checkpoint.keep or spec.tracking.trajectoriesSize for less; if it is not full, make it work again"
)
_Result = TypeVar("_Result")


class DiskError(TransientError):
    """The volume of the run's folder is full, or does not work."""


class RunDisk:
    def __init__(self, run_dir: Path, outages: Outages | None = None) -> None:
        self._run_dir = run_dir
        self.health = (outages or Outages()).watch(f"spec.checkpoint ({run_dir})", _REMEDY)
        self.health.succeeded()  # the run's id is in it

    async def write(self, where: Path, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work`, which runs in a thread. While the volume is full or away, wait and repeat it.
        Raise OutageError after spec.outageSeconds. `where`: what is written."""

        return await self.run(where, partial(run_in_thread, work))

    async def run(self, where: Path, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """The same for work that awaits."""

        async def attempt() -> _Result:
            with disk_errors(where):
                return await work()

        return await wait_out(self.health, attempt, self._explain)

    def record_failure(self, error: DiskError) -> None:
        """A write failed that is not repeated here."""
        self.health.failed(self._explain(error))

    def _explain(self, error: Exception) -> str:
        if not isinstance(error, DiskError):
            return ""
        needed = ""
        with contextlib.suppress(OSError):
            needed = f" ({shutil.disk_usage(self._run_dir).free / 2**30:.2f} GiB free{self._describe_checkpoint()})"
        return f"{error}{needed}"

    def _describe_checkpoint(self) -> str:
        folder = next(reversed(complete_checkpoints(self._run_dir).values()), None)
        if folder is None:
            return ""
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return f", a checkpoint has {num_bytes / 2**30:.2f} GiB"


@contextlib.contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Raise DiskError if the volume is full or does not work, here or in a remote process."""
    try:
        yield
    except DiskError:
        raise
    except Exception as error:
        if found := find_disk_error(error):
            raise DiskError(f"{where}: {found}") from error
        raise


def find_disk_error(error: BaseException) -> str:
    """Return the system's words for an error of the volume; empty for others. A remote one has only its text."""
    if getattr(error, "errno", None) in _AWAY_ERRORS:
        return os.strerror(error.errno)  # type: ignore[attr-defined]
    text = str(error)
    return next((words for words in map(os.strerror, _AWAY_ERRORS) if words in text), "")


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a file atomically: after a crash of the process or the node it is complete, or it does not exist."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    rename_durably(temporary, path)


def rename_durably(temporary: Path, path: Path) -> None:
    """Flush a file to the disk and rename it, and flush the rename."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
