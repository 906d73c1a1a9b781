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
from typing import Any

import yaml

from rljob_api.errors import UserError
from rljob_api.manifest.runner import RUNNER_SERVICE
from rljob_cli.report.samples import spread
from rljob_cli.run import runfolder
from rljob_cli.run.sessions import read_sessions
from rljob_cli.run.summary import build_summary
from rljob_cli.trajectories.log import LogFile, Row, list_files, read_file

_MAX_READ_BYTES = 8 << 20
"""Of Parquet files: about 10,000 samples of 300 words, which take about a second."""
_MAX_ROWS_PER_FILE = 2_000


@dataclass(frozen=True)
class RunData:
    folder: Path
    name: str
    job: dict[str, Any] | None
    """The job as it ran, with all defaults."""
    job_digest: str
    summary: dict[str, Any]
    metrics: list[Row]
    samples: list[list[Row]]
    """The rows of each step and lane that were read, oldest first."""
    num_samples: int
    """In the whole log."""
    num_files: int
    """Steps and evaluations in the whole log."""


def collect_run(folder: Path) -> RunData:
    """Read a run. Raise UserError if the folder is not a run's."""
    files = list_files(folder / "trajectories")
    metrics = runfolder.read_rows(folder / runfolder.FILE_METRICS)
    job, digest = _read_job(folder / runfolder.FILE_JOB)
    if not (files or metrics or job):
        raise UserError(f"{folder}: not the folder of a run: it has no {runfolder.FILE_JOB}, and no step has ended")
    name = str(((job or {}).get("metadata") or {}).get("name") or folder.resolve().name)
    chosen = choose_files(files)
    return RunData(
        folder=folder,
        name=name,
        job=job,
        job_digest=digest,
        summary=_read_summary(folder, name, job, metrics),
        metrics=metrics,
        samples=[list(map(add_agent, islice(read_file(file.path), _MAX_ROWS_PER_FILE))) for file in chosen],
        num_samples=sum(_count_rows(file.path) for file in files),
        num_files=len(files),
    )


def add_agent(row: Row) -> Row:
    """Return the row with one more result: what its program or environment gave, or why the episode failed."""
    if row["failure"] is None and row["own_reward"] is None:
        return row
    result = dict.fromkeys(("version", "attempts", "queue_seconds", "execute_seconds", "latency_seconds", "score"))
    result |= {"reason": None, "message": "", "components": {}}
    if row["failure"] is None:
        numbers = {name: value for name, value in json.loads(row["info"] or "{}").items() if _is_number(value)}
        result |= {"name": RUNNER_SERVICE, "valid": True, "score": row["own_reward"], "components": numbers}
    else:
        path, _, failure = row["failure"].partition(": ")
        reason, _, message = failure.partition(": ")
        result |= {"name": path, "valid": False, "reason": reason, "message": message}
    return row | {"rewards": [*row["rewards"], result]}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def choose_files(files: Sequence[LogFile], max_bytes: int = _MAX_READ_BYTES) -> list[LogFile]:
    """Return files of both lanes, spread over the run, up to a total size; at least the last of each lane."""
    lanes = [[file for file in files if file.lane == lane] for lane in ("eval", "train")]
    orders = [[own[index] for index in spread(len(own))] for own in lanes]
    chosen: list[LogFile] = []
    total = 0
    for turn in range(max(map(len, orders), default=0)):
        for file in (order[turn] for order in orders if turn < len(order)):
            total += _size(file.path)
            if turn > 0 and total > max_bytes:
                return sorted(chosen)
            chosen.append(file)
    return sorted(chosen)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the run in progress has deleted it
        return 0


def _count_rows(path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException):
        return 0


def _read_job(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the job and the digest of its spec; None if the folder has no job."""
    try:
        job = yaml.safe_load(path.read_text(encoding="utf-8"))
        spec = json.dumps(job["spec"], sort_keys=True)
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None, ""
    return job, hashlib.sha256(spec.encode()).hexdigest()[:16]


def _read_summary(folder: Path, name: str, job: dict[str, Any] | None, metrics: list[Row]) -> dict[str, Any]:
    """Return summary.json. A run in progress, or in a cluster, has none: build it from the rest."""
    try:
        summary: dict[str, Any] = json.loads((folder / runfolder.FILE_SUMMARY).read_text())
        if "evaluations" in summary:
            return summary
    except (OSError, ValueError):
        pass
    sessions = read_sessions(folder)
    schedule = ((job or {}).get("spec") or {}).get("schedule") or {}
    driver = runfolder.read_driver_summary(folder)
    last = max((row["step"] for row in metrics), default=0)
    is_done = bool(driver.get("export")) or (bool(schedule) and last >= schedule.get("steps", 0))
    ended = sessions[-1].phase if sessions else ""
    return build_summary(
        name=name,
        phase=ended or ("Succeeded" if is_done else "Unfinished"),
        total_steps=int(schedule.get("steps") or last),
        driver=driver,
        rows=metrics,
        sessions=sessions,
        checkpoint=runfolder.last_checkpoint(folder),
    )
