"""Finds and reads the trajectory log of a run. The trainer writes it; `rljob_api.run.trajectories` has its columns."""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.read.documents import read_documents
from rljob_api.run.folder import FILE_JOB, TRAJECTORIES, TrajectoryFile, list_trajectory_files
from rljob_api.run.trajectories import FORMAT, FORMAT_KEY, REPLAY_COLUMNS, SampleRow

_ROWS_PER_BATCH = 512


@dataclass(frozen=True)
class Filter:
    """Which samples are selected. None: any."""

    step: int | None = None
    lane: str | None = None
    reward: str | None = None
    """Use the scores and validity of this reward; None: the weighted sum, and any reward's validity."""
    invalid: bool = False
    min_score: float | None = None
    max_score: float | None = None
    group: int | None = None
    eval_set: str | None = None
    """Name of an evaluation set."""
    reason: str | None = None
    """Why a result is invalid or failed, or why the episode did."""

    def reads(self, file: TrajectoryFile) -> bool:
        """Whether a file of the log may have a selected row."""
        return self.step in (None, file.step) and self.lane in (None, file.lane)

    def matches(self, row: SampleRow) -> bool:
        """Whether a row is selected; the file's name has already decided on `step` and `lane`."""
        if self.group is not None and row.group != self.group:
            return False
        if self.eval_set is not None and row.set != self.eval_set:
            return False
        if self.reason is not None and self.reason not in find_reasons(row, self.reward):
            return False
        if row.failure:  # no reward has scored it
            return self.reward is None and self.min_score is None and self.max_score is None
        results = [result for result in row.rewards if self.reward in (None, result.name)]
        # An agent may bring its own reward; then there may be no other.
        if (self.reward is not None and not results) or (self.invalid and all(result.valid for result in results)):
            return False
        if self.min_score is None and self.max_score is None:
            return True
        score = results[0].score if self.reward else row.score
        low, high = self.min_score, self.max_score
        return score is not None and (low is None or score >= low) and (high is None or score <= high)


def find_reasons(row: SampleRow, reward: str | None = None) -> set[str]:
    """Return why results of a reward, or of any, are invalid or failed, or why the episode did."""
    failure = {row.failure.split(": ")[1]} if row.failure and row.failure.count(": ") else set()
    return failure | {each.reason for each in row.rewards if each.reason and reward in (None, each.name)}


def sort_rows(rows: Iterable[SampleRow], by: str, reward: str | None, limit: int | None) -> list[SampleRow]:
    """Return the first rows, or all: those with the slowest reward, or the highest score, first; unknown ones last. At
    most `limit` rows are in memory."""

    def key(row: SampleRow) -> float:
        value = latency_of(row, reward) if by == "latency" else _score_of(row, reward)
        return math.inf if value is None else -value

    return sorted(rows, key=key) if limit is None else heapq.nsmallest(limit, rows, key=key)


def latency_of(row: SampleRow, reward: str | None = None) -> float | None:
    """Return the seconds of a reward, or of the slowest one: to the result, or of its execution. None: unknown."""
    results = [each for each in row.rewards if reward in (None, each.name)]
    known = [each.execute_seconds if each.latency_seconds is None else each.latency_seconds for each in results]
    return max((value for value in known if value is not None), default=None)


def _score_of(row: SampleRow, reward: str | None) -> float | None:
    if reward is None:
        return row.score
    return next((each.score for each in row.rewards if each.name == reward), None)


def find_run(run: str, directory: Path) -> Path:
    """Return the folder for a run's folder, a job's file or a job's name. Raise UserError if it does not exist."""
    given = Path(run)
    if given.is_file():
        given = directory / _read_name(given)
    elif str(given) == given.name and not is_run(given):  # `rljob init sums` has written a folder of the same name
        given = directory / given
    if not given.exists():
        remedy = "pass its folder, its job file, or --dir with the parent of its folder"
        raise UserError(f"{given}: run not found; {remedy}")
    return given


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


def read_rows(folder: Path, filter_: Filter) -> Iterator[SampleRow]:
    """Yield the selected rows, newest step first, within a step by group and sample."""
    for file in reversed(list_trajectory_files(folder)):
        if filter_.reads(file):
            yield from (row for row in read_file(file.path) if filter_.matches(row))


def list_sets(folder: Path) -> list[str]:
    """Return the names of all evaluation sets of the log."""
    return sorted({row.set for row in read_rows(folder, Filter(lane="eval")) if row.set is not None})


def list_rewards(folder: Path) -> list[str]:
    """Return the names of all rewards of the log."""
    return sorted({result.name for row in read_rows(folder, Filter()) for result in row.rewards})


def read_file(path: Path, max_rows: int | None = None) -> Iterator[SampleRow]:
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
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from map(SampleRow.model_validate, islice(rows, max_rows))
    except FileNotFoundError:
        return  # the run in progress has deleted the file to limit the log, or repeats the step
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}; remove it to see the other steps") from None


def curves_of(row: SampleRow) -> dict[str, float]:
    """Return the valid scores of a sample: score, REWARD and REWARD/COMPONENT."""
    curves = {} if row.score is None else {"score": row.score}
    for result in row.rewards:
        if result.score is not None:
            curves[result.name] = result.score
            curves |= {f"{result.name}/{name}": value for name, value in result.components.items()}
    return curves
