"""The files of a run that the head serves to readers, under RUN_ROUTE."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from rljob_api.run.base import Record
from rljob_api.run.folder import (
    FILE_BEST,
    FILE_DRIVER_SUMMARY,
    FILE_JOB,
    FILE_METRICS,
    TRAJECTORIES,
    list_trajectory_files,
    parse_trajectory_file,
)

_NAMES = (FILE_METRICS, FILE_DRIVER_SUMMARY, FILE_BEST)


class RunFile(Record):
    """A file that may be read. Its size and time say whether it has changed."""

    name: str
    """Its path in the run's folder; `job.yaml` is the job as the head has it."""
    num_bytes: int
    modified: int
    """Nanoseconds since 1970."""


def list_run_files(run_dir: Path, job_file: Path) -> dict[str, Path]:
    """Return the paths of what reports read, by name. Files that do not exist are among them."""
    log = {f"{TRAJECTORIES}/{file.path.name}": file.path for file in list_trajectory_files(run_dir / TRAJECTORIES)}
    return {FILE_JOB: job_file} | {name: run_dir / name for name in _NAMES} | log


def is_run_file(name: str) -> bool:
    """Whether a name is one of those that a head serves: what a head says decides on no other path."""
    path = PurePosixPath(name)
    if str(path) != name or len(path.parts) != 2:
        return name in (FILE_JOB, *_NAMES)
    return path.parts[0] == TRAJECTORIES and parse_trajectory_file(Path(name)) is not None


def describe_files(paths: dict[str, Path]) -> list[RunFile]:
    """Return the files that exist."""
    found = []
    for name, path in paths.items():
        try:
            state = path.stat()
        except OSError:
            continue
        found.append(RunFile(name=name, num_bytes=state.st_size, modified=state.st_mtime_ns))
    return found
