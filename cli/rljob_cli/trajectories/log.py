"""Finds runs, and reads the trajectory log of a run. `rljob_api.run.trajectories` has its columns.

Commands import it before their work: that a run does not exist is said within the time of few imports.
"""

import contextlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from typer import BadParameter

from rljob_api.errors import UserError
from rljob_api.read.documents import read_documents
from rljob_api.run.folder import FILE_JOB, TRAJECTORIES, list_trajectory_files
from rljob_api.run.trajectories import FORMAT, FORMAT_KEY, REPLAY_COLUMNS
from rljob_cli.options import RUNS, Target
from rljob_inputs.data.files import suggest_path

_ROWS_PER_BATCH = 512


class DamagedFileError(UserError):
    """A file of the log cannot be read: the disk was full, or a copy of it was cut off."""


def find_run(run: str, directory: Path) -> Path:
    """Return the folder for a run's folder, a job's file or a job's name. Raise UserError if it does not exist."""
    given = Path(run)
    if given.is_file():
        given = directory / _read_name(given)
    elif str(given) == given.name and not is_run(given):  # `rljob init sums` has written a folder of the same name
        given = directory / given
    if not given.exists():
        remedy = "pass its folder, its job file, or --dir with the parent of its folder"
        raise UserError(f"{given}: run not found{suggest_path(given)}; {remedy}")
    return given


def find_here(name: str, target: Target) -> Path | None:
    """Return the folder of the run that the name of a job means; None: a job in the cluster. It is the run if that is
    named by its path, is in progress, or if there is no cluster."""
    with contextlib.suppress(UserError):
        folder = find_run(name, RUNS).resolve()
        from rljob_cli.run.runfolder import is_in_use  # here: there is a run

        is_meant = not target.exists() or (not target and ("/" in name or is_in_use(folder)))
        return folder if is_meant and (folder / FILE_JOB).exists() else None
    if not target.exists() or ("/" in name and not target):
        also = "" if target.exists() else "; no kubeconfig names a cluster"
        raise BadParameter(f"no run at {name}; `rljob ls` lists runs{also}")
    return None


def is_run(folder: Path) -> bool:
    """Whether it is a run's folder, or that of its log."""
    return any((folder / name).exists() for name in (FILE_JOB, TRAJECTORIES)) or bool(list_trajectory_files(folder))


def find_log(run: str, directory: Path) -> Path:
    """Return the log's folder for a run's folder, a job's file or a job's name. Raise UserError if it is missing."""
    given = find_run(run, directory)
    for folder in (given / TRAJECTORIES, given):
        if list_trajectory_files(folder):
            return folder
    reason = "a run writes them after each step, unless spec.tracking.trajectoriesSize is 0"
    raise UserError(f"{given / TRAJECTORIES}: no trajectories yet; {reason}")


def _read_name(path: Path) -> str:
    """Return metadata.name of a file's RLJob, which need not be valid otherwise."""
    try:
        documents, _ = read_documents(path.read_text(encoding="utf-8"))
        jobs = [d.data for d in documents if isinstance(d.data, dict) and d.data.get("kind") == "RLJob"]
        return str(jobs[0]["metadata"]["name"])
    except (OSError, UnicodeDecodeError, IndexError, KeyError, TypeError):
        raise UserError(f"{path}: contains no RLJob; pass a run's folder or a job's file") from None


def read_values(path: Path, max_rows: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the first rows of one file, or all, in the order of the data; none if the run has deleted it meanwhile."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A part of a file is read alone, so that it does not cost as much as the whole.
        with pq.ParquetFile(path, pre_buffer=max_rows is None) as file:
            if (file.schema_arrow.metadata or {}).get(FORMAT_KEY.encode()) != FORMAT.encode():
                remedy = "use that version's `rljob trajectories`"
                raise UserError(f"{path}: was written by another version of rljob; {remedy}")
            columns = [name for name in file.schema_arrow.names if name not in REPLAY_COLUMNS]
            size = _ROWS_PER_BATCH if max_rows is None else max(1, max_rows)
            batches = file.iter_batches(batch_size=size, columns=columns)
            yield from islice((row for batch in batches for row in batch.to_pylist()), max_rows)
    except FileNotFoundError:
        return  # the run in progress has deleted the file to limit the log, or repeats the step
    except (OSError, pa.ArrowException) as error:
        raise DamagedFileError(f"{path}: cannot be read: {error}") from None
