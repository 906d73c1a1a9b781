"""Reads what a report shows from a run's folder. What a folder lacks, such as one copied from a cluster, is empty.

Invariant: reading is bounded, so that a large run's report takes about as long as a small one's.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rljob_api.errors import UserError
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.run.folder import (
    FILE_JOB,
    FILE_METRICS,
    TRAJECTORIES,
    TrajectoryFile,
    last_checkpoint,
    list_trajectory_files,
)
from rljob_api.run.metrics import Metrics, read_metrics
from rljob_api.run.sessions import read_sessions
from rljob_api.run.summaries import RunSummary, read_driver_summary, read_run_summary
from rljob_api.run.trajectories import ResultRow, SampleRow
from rljob_cli.report.samples import spread
from rljob_cli.run.runfolder import is_in_use
from rljob_cli.run.summary import build_summary
from rljob_cli.trajectories.log import DamagedFileError, read_values

_MAX_READ_BYTES = 8 << 20
"""Limit of Parquet files: about 10,000 samples of 300 words, which take about a second."""
_MIN_ROW_BYTES = 800
"""A sample counts as at least so many: short ones compress to a tenth of that, and take as long."""
_MIN_ROWS_PER_FILE = 2
_MAX_FILES = 400
"""Steps and evaluations. The page has at most twice as many samples."""


@dataclass(frozen=True)
class RunData:
    folder: Path
    name: str
    job: dict[str, Any] | None
    """The job as it ran, with all defaults."""
    job_digest: str
    summary: RunSummary
    metrics: Metrics
    samples: list[list[SampleRow]]
    """The rows of each step and lane that were read, oldest first."""
    num_samples: int
    """In the whole log."""
    num_files: int
    """Steps and evaluations in the whole log."""
    damaged: list[str]
    """Files of the log that cannot be read, as far as they were looked at."""


def name_run(job: dict[str, Any] | None, folder: Path) -> str:
    """Return the name of a run's job, or of its folder."""
    return str(((job or {}).get("metadata") or {}).get("name") or folder.resolve().name)


def collect_run(
    folder: Path,
    *,
    answers: bool = False,
    metrics: Metrics | None = None,
    max_files: int | None = None,
) -> RunData:
    """Read a run. Raise UserError if the folder is not a run's. `answers`: as in read_summary. `metrics`: those of the
    folder, if they are known. `max_files`: so many files of the log, spread over the run, and a quarter of the bytes,
    stand for all; num_samples counts theirs."""
    files = all_files = list_trajectory_files(folder / TRAJECTORIES)
    if max_files is not None:
        files = sorted(files[index] for index in islice(spread(len(files)), max_files))
    metrics = read_metrics(folder / FILE_METRICS) if metrics is None else metrics
    job, digest = read_job(folder / FILE_JOB)
    if not (files or metrics.records or job):
        raise UserError(f"{folder}: not the folder of a run: it has no {FILE_JOB}, and no step has ended")
    name = name_run(job, folder)
    damaged: list[str] = []
    counts = [_count_rows(file.path, damaged) for file in files]
    sizes = [max(_size(file.path), _MIN_ROW_BYTES * count) for file, count in zip(files, counts, strict=True)]
    max_bytes = _MAX_READ_BYTES if max_files is None else _MAX_READ_BYTES // 4
    readings = plan_reading(list(zip(files, sizes, counts, strict=True)), max_bytes)
    return RunData(
        folder=folder,
        name=name,
        job=job,
        job_digest=digest,
        summary=read_summary(folder, name, job, metrics, answers=answers),
        metrics=metrics,
        samples=[_read_samples(*each, damaged) for each in readings],
        num_samples=sum(counts),
        num_files=len(all_files),
        damaged=damaged,
    )


def _read_samples(file: TrajectoryFile, num_rows: int, damaged: list[str]) -> list[SampleRow]:
    try:
        values = list(read_values(file.path, num_rows)) if num_rows else []
    except DamagedFileError:
        damaged.append(file.path.name)
        return []
    return [add_agent(SampleRow.model_validate(each)) for each in values]


def add_agent(row: SampleRow) -> SampleRow:
    """Return the row with one more result: what its program or environment gave, or why the episode failed."""
    if row.failure is not None:
        path, _, failure = row.failure.partition(": ")
        reason, _, message = failure.partition(": ")
        result = ResultRow(name=path, valid=False, reason=reason, message=message)
    elif row.own_reward is not None:
        numbers = {
            name: value
            for name, value in json.loads(row.info or "{}").items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        result = ResultRow(name=RUNNER_SERVICE, valid=True, score=row.own_reward, components=numbers)
    else:
        return row
    return row.model_copy(update={"rewards": [*row.rewards, result]})


class Reading(NamedTuple):
    """A file of the log, and how many of its first rows are read."""

    file: TrajectoryFile
    num_rows: int


def plan_reading(
    sized: Sequence[tuple[TrajectoryFile, int, int]], max_bytes: int = _MAX_READ_BYTES, max_files: int = _MAX_FILES
) -> list[Reading]:
    """Return what is read of a log: all of a small one, else some rows of many files of both lanes, spread over the
    run. `sized`: each file with its bytes and its rows. At least the last file of each lane is read."""
    lanes = [[each for each in sized if each[0].lane == lane] for lane in ("eval", "train")]
    orders = [[own[index] for index in spread(len(own))] for own in lanes]
    turns = range(max(map(len, orders), default=0))
    in_turn = [(turn, order[turn]) for turn in turns for order in orders if turn < len(order)]
    chosen: list[tuple[TrajectoryFile, int, int]] = []
    smallest = 0.0
    for turn, each in in_turn:
        smallest += each[1] * min(1.0, _MIN_ROWS_PER_FILE / max(1, each[2]))
        if turn > 0 and (smallest > max_bytes or len(chosen) >= max_files):
            break
        chosen.append(each)
    share = max(1.0, sum(size for _, size, _ in chosen) / max_bytes)
    return sorted(
        Reading(file, min(num_rows, max(_MIN_ROWS_PER_FILE, int(num_rows / share)))) for file, _, num_rows in chosen
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the run in progress has deleted it
        return 0


def _count_rows(path: Path, damaged: list[str]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except FileNotFoundError:  # the run in progress has deleted it
        return 0
    except (OSError, pa.ArrowException):
        damaged.append(path.name)
        return 0


def read_job(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the job and the digest of its spec; None if the folder has no job."""
    try:
        job = yaml.safe_load(path.read_text(encoding="utf-8"))
        spec = json.dumps(job["spec"], sort_keys=True)
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None, ""
    return job, hashlib.sha256(spec.encode()).hexdigest()[:16]


def read_summary(
    folder: Path, name: str, job: dict[str, Any] | None, metrics: Metrics, *, answers: bool = False
) -> RunSummary:
    """Return summary.json. A run in progress, or in a cluster, has none: build it from the rest. `answers`: whether its
    head answers, as that of a cluster's run, of which the folder is a copy."""
    if (summary := read_run_summary(folder)) is not None:
        return summary
    sessions, driver = read_sessions(folder), read_driver_summary(folder)
    schedule = ((job or {}).get("spec") or {}).get("schedule") or {}
    last = max((record.step for record in metrics.records), default=0)
    is_done = bool(driver and driver.export) or (bool(schedule) and last >= schedule.get("steps", 0))
    ended = sessions[-1].phase if sessions else ""
    unfinished = "Running" if answers or is_in_use(folder) else "Unfinished"
    return build_summary(
        name=name,
        phase=ended or ("Succeeded" if is_done else unfinished),
        total_steps=int(schedule.get("steps") or last),
        driver=driver,
        metrics=metrics,
        sessions=sessions,
        checkpoint=last_checkpoint(folder),
    )
