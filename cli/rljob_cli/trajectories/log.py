"""Finds and reads the trajectory log of a run. The trainer writes it; docs/trajectories.md defines its columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rljob_api.errors import UserError
from rljob_api.read.documents import read_documents
from rljob_cli.run.runfolder import FILE_JOB

Row = dict[str, Any]
_FORMAT_KEY, _FORMAT = b"rljob.trajectories", b"1"
_LATER_COLUMNS: Row = {
    "end": None,
    "failure": None,
    "messages": None,
    "state": None,
    "turns": [],
    "segments": [],
    "own_reward": None,
    "info": None,
}
"""Columns that older logs lack."""


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

    def matches(self, row: Row) -> bool:
        """Whether a row is selected; the file's name has already decided on `step` and `lane`."""
        if self.group is not None and row["group"] != self.group:
            return False
        if row["failure"]:  # no reward has scored it
            return self.reward is None and self.min_score is None and self.max_score is None
        rewards = [reward for reward in row["rewards"] if self.reward in (None, reward["name"])]
        # An agent may bring its own reward; then there may be no other.
        if (self.reward is not None and not rewards) or (self.invalid and all(reward["valid"] for reward in rewards)):
            return False
        if self.min_score is None and self.max_score is None:
            return True
        score = rewards[0]["score"] if self.reward else row["score"]
        low, high = self.min_score, self.max_score
        return score is not None and (low is None or score >= low) and (high is None or score <= high)


class LogFile(NamedTuple):
    """One file of the log; files sort by age."""

    step: int
    lane: str
    path: Path


def find_run(run: str, directory: Path) -> Path:
    """Return the folder for a run's folder, a job's file or a job's name. Raise UserError if it does not exist."""
    given = Path(run)
    if given.is_file():
        given = directory / _read_name(given)
    elif str(given) == given.name and not _is_run(given):  # `rljob init sums` has written a folder of the same name
        given = directory / given
    if not given.exists():
        remedy = "pass its folder, its job file, or --dir with the parent of its folder"
        raise UserError(f"{given}: run not found; {remedy}")
    return given


def _is_run(folder: Path) -> bool:
    """Whether it is a run's folder, or that of its log."""
    return any((folder / name).exists() for name in (FILE_JOB, "trajectories")) or bool(list_files(folder))


def find_log(run: str, directory: Path) -> Path:
    """Return the log's folder for a run's folder, a job's file or a job's name. Raise UserError if it is missing."""
    given = find_run(run, directory)
    for folder in (given / "trajectories", given):
        if list_files(folder):
            return folder
    reason = "a run writes them after each step, unless spec.tracking.trajectoriesMiB is 0"
    raise UserError(f"{given / 'trajectories'}: no trajectories yet; {reason}")


def _read_name(path: Path) -> str:
    """Return metadata.name of a file's RLJob, which need not be valid otherwise."""
    try:
        documents, _ = read_documents(path.read_text(encoding="utf-8"))
        jobs = [d.data for d in documents if isinstance(d.data, dict) and d.data.get("kind") == "RLJob"]
        return str(jobs[0]["metadata"]["name"])
    except (OSError, UnicodeDecodeError, IndexError, KeyError, TypeError):
        raise UserError(f"{path}: contains no RLJob; pass a run's folder or a job's file") from None


def list_files(folder: Path) -> list[LogFile]:
    found = []
    for path in folder.glob("step-*.*.parquet"):
        step, _, lane = path.name.removeprefix("step-").removesuffix(".parquet").partition(".")
        if step.isdigit():
            found.append(LogFile(int(step), lane, path))
    return sorted(found)


def read_rows(folder: Path, filter_: Filter) -> Iterator[Row]:
    """Yield the selected rows, newest step first, within a step by group and sample."""
    for file in reversed(list_files(folder)):
        if filter_.step in (None, file.step) and filter_.lane in (None, file.lane):
            yield from (row for row in read_file(file.path) if filter_.matches(row))


def list_rewards(folder: Path) -> list[str]:
    """Return the names of all rewards of the log."""
    return sorted({reward["name"] for row in read_rows(folder, Filter()) for reward in row["rewards"]})


def read_file(path: Path) -> Iterator[Row]:
    """Yield the rows of one file, in the order of the data; none if the run has deleted it meanwhile."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if (file.schema_arrow.metadata or {}).get(_FORMAT_KEY) != _FORMAT:
                remedy = "use that version's `rljob trajectories`"
                raise UserError(f"{path}: was written by another version of rljob; {remedy}")
            for batch in file.iter_batches(batch_size=512):
                yield from (_plain(row) for row in batch.to_pylist())
    except FileNotFoundError:
        return  # the run in progress has deleted the file to limit the log, or repeats the step
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}; remove it to see the other steps") from None


def _plain(row: Row) -> Row:
    rewards = [{**reward, "components": dict(reward["components"] or [])} for reward in row["rewards"] or []]
    return {**_LATER_COLUMNS, **row, "rewards": rewards}


def curves_of(row: Row) -> dict[str, float]:
    """Return the valid scores of a sample: score, REWARD and REWARD/COMPONENT."""
    curves = {} if row["score"] is None else {"score": row["score"]}
    for reward in row["rewards"]:
        if reward["valid"]:
            curves[reward["name"]] = reward["score"]
            curves |= {f"{reward['name']}/{name}": value for name, value in reward["components"].items()}
    return curves
