"""The samples of a log without their texts: what filters and sorts a log that is larger than memory.

Invariants: a file is indexed once for each of its contents; texts are read only for the samples of one page. A file
that the run in progress has deleted has no samples.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.run.folder import TrajectoryFile, list_trajectory_files
from rljob_api.run.trajectories import REPLAY_COLUMNS, SampleRow
from rljob_cli.output import say
from rljob_cli.trajectories.log import DamagedFileError, read_values

_RESULT_FIELDS = ("name", "valid", "score", "reason", "execute_seconds", "latency_seconds")
_COLUMNS = (
    *("group", "set", "score", "truncated", "num_sampled_tokens", "failure", "own_reward"),
    *(f"rewards.list.element.{name}" for name in _RESULT_FIELDS),
)
ORDERS = ("", "high", "low", "long", "slow")
"""By step; by score, the highest or lowest first; the longest first; the slowest reward first."""
ORDER_BY = {"latency": "slow", "reward": "high"}
"""What --sort means."""
LANES = ("", "train", "eval")
SHOWN = ("", "best", "worst", "invalid", "truncated")
"""All; the best or the worst of each step; those without a valid score; those that a limit of tokens cut."""


class Result(NamedTuple):
    """The result of one reward. `latency`: seconds; None: unknown."""

    name: str
    valid: bool
    score: float | None
    reason: str | None
    latency: float | None


class Entry(NamedTuple):
    """One sample of the log."""

    file: TrajectoryFile
    row: int
    """Its place in the file."""
    group: int
    eval_set: str | None
    score: float | None
    truncated: bool
    num_tokens: int
    results: tuple[Result, ...]

    @property
    def place(self) -> str:
        """The step and the lane."""
        return f"{self.file.step} {self.file.lane}"

    def score_of(self, reward: str | None) -> float | None:
        """Return the score of a reward, or the weighted sum. None: invalid."""
        if reward is None:
            return self.score
        return next((each.score for each in self.results if each.name == reward and each.valid), None)

    def latency_of(self, reward: str | None) -> float:
        """Return the seconds of a reward, or of the slowest one. 0: unknown."""
        return max((each.latency or 0.0 for each in self.results if reward in (None, each.name)), default=0.0)


@dataclass(frozen=True)
class Query:
    """Which samples of a log, and in which order. Empty or None: any."""

    step: int | None = None
    lane: str | None = None
    reward: str | None = None
    """Use the scores, the validity and the latency of this reward."""
    reason: str | None = None
    """Only samples with a result of this reason, or whose episode failed for it."""
    shown: str = ""
    low: float | None = None
    high: float | None = None
    text: str = ""
    """In the prompt or the completion, whatever its case."""
    order: str = ""
    group: int | None = None
    eval_set: str | None = None
    """Name of an evaluation set."""

    def reads(self, file: TrajectoryFile) -> bool:
        """Whether a file of the log may have a sample that matches."""
        return self.step in (None, file.step) and self.lane in (None, file.lane)


ALL = Query()


def select(entries: Iterable[Entry], query: Query) -> list[Entry]:
    """Return the samples that match, in order; `text` is not considered."""
    kept = [entry for entry in entries if _matches(entry, query)]
    if query.shown in ("best", "worst"):
        kept = _choose_extremes(kept, query.reward, 1 if query.shown == "best" else -1)
    keys = {
        "high": lambda entry: _rank(entry.score_of(query.reward), -1),
        "low": lambda entry: _rank(entry.score_of(query.reward), 1),
        "long": lambda entry: -entry.num_tokens,
        "slow": lambda entry: -entry.latency_of(query.reward),
    }
    return sorted(kept, key=keys[query.order]) if query.order else kept


def _rank(score: float | None, sign: int) -> float:
    """Unknown scores come last."""
    return math.inf if score is None else sign * score


def _matches(entry: Entry, query: Query) -> bool:
    results = [each for each in entry.results if query.reward in (None, each.name)]
    is_in_part = query.group in (None, entry.group) and query.eval_set in (None, entry.eval_set)
    if not (query.reads(entry.file) and is_in_part) or (query.reward is not None and not results):
        return False
    if query.reason is not None and all(each.reason != query.reason for each in results):
        return False
    if query.shown == "invalid" and all(each.valid for each in results):
        return False
    if query.shown == "truncated" and not entry.truncated:
        return False
    if query.low is None and query.high is None:
        return True
    score, low, high = entry.score_of(query.reward), query.low, query.high
    return score is not None and (low is None or score >= low) and (high is None or score <= high)


def _choose_extremes(entries: Iterable[Entry], reward: str | None, sign: int) -> list[Entry]:
    """Return the best, or the worst, sample of each step; ties go to the first."""
    chosen: dict[str, Entry] = {}
    for entry in entries:
        score = entry.score_of(reward)
        if score is None:
            continue
        other = chosen.get(entry.place)
        if other is None or sign * score > sign * (other.score_of(reward) or 0.0):
            chosen[entry.place] = entry
    return list(chosen.values())


@dataclass
class LogIndex:
    """The index of the log in a folder, which a run in progress may extend."""

    folder: Path
    files: list[TrajectoryFile] = field(default_factory=list)
    """Those of the log, at the last call of `read`."""
    num_unread: int = 0
    """Files that the last call of `read` left to the next one."""
    damaged: set[str] = field(default_factory=set)
    """Names of files that cannot be read."""
    _files: dict[Path, tuple[tuple[int, int], list[Entry]]] = field(default_factory=dict)

    def read(self, query: Query = ALL, max_new: float = math.inf) -> list[Entry]:
        """Return the samples of the files that a query reads, oldest step first. `max_new`: of files that were not read
        before so many are read, so that the first samples of a long run do not wait for the last ones."""
        self.files, self.num_unread = list_trajectory_files(self.folder), 0
        found: list[Entry] = []
        for file in filter(query.reads, self.files):
            try:
                stat = file.path.stat()
            except OSError:  # the run in progress has deleted it
                continue
            state, known = (stat.st_size, stat.st_mtime_ns), self._files.get(file.path)
            if known is None or known[0] != state:
                if max_new <= 0:
                    self.num_unread += 1
                    continue
                max_new -= 1
                known = self._files[file.path] = state, self._read_file(file)
            found += known[1]
        if len(self._files) > len(self.files):
            paths = {file.path for file in self.files}
            self._files = {path: kept for path, kept in self._files.items() if path in paths}
        return found

    def _read_file(self, file: TrajectoryFile) -> list[Entry]:
        table = _read_table(file.path, _COLUMNS)
        (self.damaged.add if table is None and file.path.exists() else self.damaged.discard)(file.path.name)
        rows = [] if table is None else table.to_pylist()
        return [_describe(file, *each) for each in enumerate(rows)]


def _describe(file: TrajectoryFile, number: int, row: dict[str, Any]) -> Entry:
    """`row`: of this or another version, which may have fewer columns."""
    results = [_describe_result(each) for each in row.get("rewards") or ()]
    if failure := row.get("failure"):
        path, _, cause = failure.partition(": ")
        results.append(Result(path, False, None, cause.partition(": ")[0], None))
    elif (own := row.get("own_reward")) is not None:
        results.append(Result(RUNNER_SERVICE, True, own, None, None))
    tokens = row.get("num_sampled_tokens") or 0
    place = (file, number, row["group"], row.get("set"))
    return Entry(*place, row["score"], bool(row["truncated"]), tokens, tuple(results))


def _describe_result(result: dict[str, Any]) -> Result:
    latency = result.get("latency_seconds")
    latency = result.get("execute_seconds") if latency is None else latency
    name, reason = sys.intern(result["name"]), result["reason"]
    return Result(name, result["valid"], result["score"], reason and sys.intern(reason), latency)


def read_rows(folder: Path, query: Query) -> Iterator[SampleRow]:
    """Yield the samples of a log that match, newest step first, within a step in the order of the data; neither `text`
    nor `order` is considered."""
    for file in reversed(list_trajectory_files(folder)):
        try:
            for number, values in enumerate(read_values(file.path) if query.reads(file) else ()):
                if _matches(_describe(file, number, values), query):
                    yield SampleRow.model_validate(values)
        except DamagedFileError as error:
            if query.step is not None:
                raise
            say(f"warning: {error}; its samples are left out")


def read_entries(entries: Sequence[Entry]) -> list[SampleRow]:
    """Return the samples with their texts, in the given order, without those whose file was deleted meanwhile."""
    by_path: dict[Path, list[Entry]] = {}
    for entry in entries:
        by_path.setdefault(entry.file.path, []).append(entry)
    rows = {key: row for path, own in by_path.items() for key, row in _read_rows(path, own)}
    return [rows[entry.file.path, entry.row] for entry in entries if (entry.file.path, entry.row) in rows]


def _read_rows(path: Path, entries: Sequence[Entry]) -> Iterator[tuple[tuple[Path, int], SampleRow]]:
    names = [name for name in SampleRow.model_fields if name not in REPLAY_COLUMNS]
    table = _read_table(path, names)
    if table is None or max(entry.row for entry in entries) >= table.num_rows:  # a repeated step has replaced it
        return
    for entry, row in zip(entries, table.take([entry.row for entry in entries]).to_pylist(), strict=True):
        yield (path, entry.row), SampleRow.model_validate(row)


def find_text(entries: Sequence[Entry], text: str) -> list[Entry]:
    """Return the samples whose prompt or completion contains a text, whatever its case."""
    import pyarrow.compute as pc

    found: dict[Path, set[int]] = {}
    for path in {entry.file.path for entry in entries}:
        table = _read_table(path, ("prompt", "completion", "messages"))
        columns = [] if table is None else [table[name] for name in table.column_names]
        masks = [pc.match_substring(column, text, ignore_case=True).to_pylist() for column in columns]
        found[path] = {number for mask in masks for number, is_in in enumerate(mask) if is_in}
    return [entry for entry in entries if entry.row in found[entry.file.path]]


def _read_table(path: Path, columns: Sequence[str]) -> Any:
    """Return an arrow table of these columns; None if the file was deleted or cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=list(columns))
    except (OSError, pa.ArrowException):
        return None
