"""The folder of a run: its lock, the files of an earlier run, and whether the same job may resume in it.

Invariant: at most one `rljob run` uses a folder at a time. The kernel drops the lock even if its holder is killed.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from rljob_api.errors import UserError
from rljob_api.manifest.immutable_fields import pick_resume_fields
from rljob_api.manifest.job import RLJob
from rljob_api.run.folder import (
    FILE_DRIVER_SUMMARY,
    FILE_JOB,
    FILE_METRICS,
    FILE_REPORT,
    FILE_SESSIONS,
    FILE_SUMMARY,
    last_checkpoint,
)
from rljob_api.run.metrics import Metrics, parse_metrics
from rljob_api.run.origin import Change, read_origin
from rljob_api.run.summaries import read_run_summary
from rljob_api.wire.redaction import redact_job
from rljob_core.children.common import to_yaml


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock the folder. Raise UserError with the process that holds it."""
    import fcntl  # here: other systems than Linux and macOS have no such module, and no runs, but use the rest

    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock_of(folder).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"{folder} is in use by another `rljob run`, {holder}; wait for it or stop it") from None
        file.truncate(0)
        file.write(f"pid {os.getpid()}, since {datetime.now().astimezone().isoformat(timespec='seconds')}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def is_in_use(folder: Path) -> bool:
    """Whether a run on this machine is in progress in the folder."""
    return find_process(folder) is not None


def find_process(folder: Path) -> int | None:
    """Return the process of the run in progress in the folder. Reads what its lock says: to try the lock would refuse a
    run that starts at this moment."""
    import psutil

    try:
        found = re.match(r"pid (\d+), since (\S+)", _lock_of(folder).read_text())
        # The number of a process that was killed may be that of another one by now.
        if found is None:
            return None
        end_of_second = datetime.fromisoformat(found[2]).timestamp() + 1
        return int(found[1]) if psutil.Process(int(found[1])).create_time() < end_of_second else None
    except (OSError, ValueError, psutil.Error):
        return None


def _lock_of(folder: Path) -> Path:
    """Return the file next to the folder, because --fresh renames it."""
    return folder.parent / f".{folder.name}.lock"


def set_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run. Return its new name; None if it does not exist."""
    if not folder.exists():
        return None
    return folder.rename(folder.with_name(f"{folder.name}.{datetime.now():%Y%m%d-%H%M%S}"))


def has_checkpoint(folder: Path) -> bool:
    return last_checkpoint(folder) is not None


def find_changed(folder: Path, job: RLJob) -> tuple[list[Change], list[Change]]:
    """Return the fields that differ from the job of the folder's checkpoint: those that may not, and those that may.

    None without origin.json: users remove it to go on with another job. Raise ValueError if it is damaged."""
    saved = folder / FILE_JOB
    origin = read_origin(folder) if has_checkpoint(folder) and saved.is_file() else None
    if origin is None:
        return [], []
    # Not those of origin.json, which are of the head's file of the job.
    before, now = (pick_resume_fields(job["spec"]) for job in (yaml.safe_load(saved.read_text()), dump(job)))
    earlier = origin.model_copy(update={"fields": before.fixed, "recorded": before.recorded})
    return earlier.find_refused(now.fixed), earlier.find_allowed(now.recorded)


def is_finished(folder: Path, job: RLJob) -> bool:
    """Whether an earlier run in the folder has succeeded with all steps of the job."""
    summary = read_run_summary(folder)
    return summary is not None and summary.phase == "Succeeded" and summary.steps >= job.spec.num_steps


def prepare(folder: Path, job: RLJob) -> None:
    """Create the folder and write the job. A run that starts over removes an earlier run's results, so that they are
    not mistaken for new. One that resumes keeps them until it has better ones, but for those that say how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE_JOB).write_text(to_yaml(redact_job(dump(job))))
    ended, pages = (FILE_DRIVER_SUMMARY, FILE_SUMMARY), (FILE_SESSIONS, FILE_METRICS, FILE_REPORT)
    for name in ended if has_checkpoint(folder) else ended + pages:
        (folder / name).unlink(missing_ok=True)


class MetricsReader:
    """Reads a file that is polled: of one that has grown the new lines alone, since a long run has thousands."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: tuple[int, int] | None = None
        self._metrics = Metrics()
        self._end, self._last = 0, b""
        """Where the last complete line ends, and that line."""

    def read(self) -> Metrics:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return Metrics()
        if (state := (found.st_size, found.st_mtime_ns)) != self._state:
            self._read_lines()
            self._state = state
        return self._metrics

    def _read_lines(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:  # a restart from a checkpoint has cut the history
                self._metrics, self._end, self._last = Metrics(), 0, b""
                file.seek(0)
            new = parse_metrics(self._take_lines(file))
        known = self._metrics
        self._metrics = Metrics(known.steps + new.steps, known.evaluations + new.evaluations)

    def _take_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the complete lines, one after the other: a long run's take as much memory as its records."""
        end, last = self._end, self._last
        for line in file:
            if line.endswith(b"\n"):  # else it is written at this moment
                end, last = end + len(line), line
                yield line
        self._end, self._last = end, last  # what a failure leaves is read again


def dump(job: RLJob) -> dict[str, Any]:
    """Return the manifest with all defaults, without its status."""
    dumped: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude={"status"})
    return dumped
