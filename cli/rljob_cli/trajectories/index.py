"""The samples of a log without their texts: what filters and sorts a log that is larger than memory.

Invariants: a file is indexed once for each of its contents; a sample takes about 30 bytes, and each of its results as
many; texts are read only for the samples of one page. A file that the run in progress has deleted has no samples.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
ORDERS = ("", "new", "high", "low", "long", "slow")
"""By step, the oldest or newest first; by score, the highest or lowest; the longest first; the slowest reward first."""
ORDER_BY = {"latency": "slow", "reward": "high"}
"""What --sort means."""
LANES = ("", "train", "eval")
SHOWN = ("", "best", "worst", "invalid", "truncated")
"""All; the best or the worst of each step; those without a valid score; those that a limit of tokens cut."""
FileState = tuple[int, int] | None
"""Bytes, and nanoseconds since 1970. None: the file does not exist."""
Array = Any
"""An array of numpy, which the extra `data` brings: it is imported only where it is used."""
_SAMPLE = [("place", "i8"), ("group", "i4"), ("set", "i4"), ("score", "f8"), ("truncated", "?"), ("tokens", "i4")]
_RESULT = [("place", "i8"), ("name", "i4"), ("reason", "i4"), ("valid", "?"), ("score", "f8"), ("latency", "f8")]
"""Both are in the order of their places. A place is the number of a file, and in its lower bits the row. Texts are
their codes, and 0 is none. An unknown score is not a number; an unknown latency is 0 seconds."""
_ROW_BITS = 32
_SAMPLES_AS_A_FILE = 100
"""So many samples take about as long to index as the opening of a file."""


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


def read_state(path: Path) -> FileState:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _number(file: TrajectoryFile) -> int:
    """Ascending by age."""
    return 2 * file.step + (file.lane == "train")


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
    _states: dict[int, FileState] = field(default_factory=dict)
    _codes: dict[str | None, int] = field(default_factory=lambda: {None: 0})
    _samples: Array = field(init=False)
    _results: Array = field(init=False)

    def __post_init__(self) -> None:
        import numpy as np

        self._samples, self._results = np.empty(0, _SAMPLE), np.empty(0, _RESULT)

    def read(self, query: Query = ALL, max_new: float = math.inf, files: list[TrajectoryFile] | None = None) -> None:
        """Read the files that a query reads. `max_new`: of those that were not read before so many are read, or fewer
        large ones, so that the first samples of a long run do not wait for the last ones. `files`: those of the log."""
        self.files = list_trajectory_files(self.folder) if files is None else files
        gone, new = self._states.keys() - map(_number, self.files), list[tuple[Array, Array]]()
        self._states = {number: state for number, state in self._states.items() if number not in gone}
        self.num_unread = 0
        for file in filter(query.reads, self.files):
            number, state = _number(file), read_state(file.path)
            if self._states.get(number) == state:
                continue
            gone |= {number} & self._states.keys()
            if max_new <= 0:
                self.num_unread += 1
                continue
            new.append(self._read_file(file))
            self._states[number] = state
            max_new -= 1 + len(new[-1][0]) // _SAMPLES_AS_A_FILE
        if gone or new:
            samples, results = zip((self._samples, self._results), *new, strict=True)
            self._samples, self._results = _join(gone, *samples), _join(gone, *results)

    def _read_file(self, file: TrajectoryFile) -> tuple[Array, Array]:
        """Return its samples and their results. An older RLJob may have written fewer columns."""
        import numpy as np

        table, codes = _read_table(file.path, _COLUMNS), self._codes
        is_known = table is not None and {"group", "rewards"} <= {*table.column_names}
        (self.damaged.discard if is_known or not file.path.exists() else self.damaged.add)(file.path.name)
        samples, results = list[tuple[Any, ...]](), list[tuple[Any, ...]]()

        def add(name: str, valid: bool, score: float | None, reason: str | None, latency: float | None) -> None:
            texts = (codes.setdefault(text, len(codes)) for text in (name, reason))
            results.append((place, *texts, valid, score, latency or 0.0))

        for place, row in enumerate(table.to_pylist() if is_known else (), _number(file) << _ROW_BITS):
            own_set = codes.setdefault(row.get("set"), len(codes))
            tokens = row.get("num_sampled_tokens") or 0
            samples.append((place, row["group"], own_set, row["score"], row.get("truncated"), tokens))
            for each in row["rewards"] or ():
                latency = each.get("latency_seconds")
                latency = each.get("execute_seconds") if latency is None else latency
                add(each["name"], each["valid"], each["score"], each["reason"], latency)
            if failure := row.get("failure"):
                path, _, cause = failure.partition(": ")
                add(path, False, None, cause.partition(": ")[0], None)
            elif (own := row.get("own_reward")) is not None:
                add(RUNNER_SERVICE, True, own, None, None)
        return np.array(samples, _SAMPLE), np.array(results, _RESULT)

    def select(self, query: Query, *, newest_first: bool = False) -> Array:
        """Return the places of the samples that match, in order; `text` is not considered. `newest_first`: the order of
        the files, within which equal samples stay."""
        import numpy as np

        places, results, scores = self._samples["place"], self._results, self._samples["score"]
        files, kept = places >> _ROW_BITS, places >= 0
        if query.step is not None:
            kept &= files >> 1 == query.step
        if query.lane is not None:
            kept &= files & 1 == (query.lane == "train")
        if query.group is not None:
            kept &= self._samples["group"] == query.group
        if query.eval_set is not None:
            kept &= self._samples["set"] == self._codes.get(query.eval_set, -1)
        if query.reward is not None:
            results = results[results["name"] == self._codes.get(query.reward, -1)]
            kept &= _find_first(results, places) >= 0
            valid = results[results["valid"]]
            scores = np.append(valid["score"], np.nan)[_find_first(valid, places)]
        if query.reason is not None:
            kept &= _find_first(results[results["reason"] == self._codes.get(query.reason, -1)], places) >= 0
        if query.shown == "invalid":
            kept &= _find_first(results[~results["valid"]], places) >= 0
        if query.shown == "truncated":
            kept &= self._samples["truncated"]
        if query.low is not None:
            kept &= scores >= query.low
        if query.high is not None:
            kept &= scores <= query.high
        if query.shown in ("best", "worst"):
            ranks = scores if query.shown == "worst" else -scores
            known = np.flatnonzero(kept & ~np.isnan(scores))
            known = known[np.lexsort((ranks[known], files[known]))]
            chosen = known[np.unique(files[known], return_index=True)[1]]  # ties go to the first
        else:
            chosen = np.flatnonzero(kept)
        if newest_first or query.order == "new":
            chosen = chosen[np.argsort(-files[chosen], kind="stable")]
        if query.order == "slow":
            slowest = results[np.lexsort((-results["latency"], results["place"]))]
            scores = np.append(slowest["latency"], 0.0)[_find_first(slowest, places)]
        keys = {"high": -scores, "low": scores, "long": -self._samples["tokens"], "slow": -scores}.get(query.order)
        return places[chosen if keys is None else chosen[np.argsort(keys[chosen], kind="stable")]]

    def read_samples(self, places: Array) -> list[SampleRow]:
        """Return the samples with their texts, in the given order, without those whose file was deleted meanwhile."""
        names = [name for name in SampleRow.model_fields if name not in REPLAY_COLUMNS]
        found = dict[int, SampleRow]()
        for start, table in self._read_tables(places, names):
            own = places[places >> _ROW_BITS == start >> _ROW_BITS].tolist()
            if max(own) - start < table.num_rows:  # else a repeated step has replaced it
                # Table.take would import pandas, which takes 40 MB.
                rows = (table.slice(place - start, 1).to_pylist()[0] for place in own)
                found |= zip(own, map(SampleRow.model_validate, rows), strict=True)
        return [found[place] for place in places.tolist() if place in found]

    def find_text(self, places: Array, text: str) -> Array:
        """Return the samples whose prompt or completion contains a text, whatever its case."""
        import numpy as np
        import pyarrow.compute as pc

        found = list[int]()
        for start, table in self._read_tables(places, ("prompt", "completion", "messages")):
            for column in table.columns:
                mask = pc.match_substring(column, text, ignore_case=True).to_pylist()
                found += [start + row for row, is_in in enumerate(mask) if is_in]
        return places[np.isin(places, np.array(found, "i8"))]

    def _read_tables(self, places: Array, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the tables of the files of places, each with the place of its first row."""
        numbers = {*(places >> _ROW_BITS).tolist()}
        for file in self.files:
            if _number(file) in numbers and (table := _read_table(file.path, names)) is not None:
                yield _number(file) << _ROW_BITS, table


def _join(gone: Collection[int], known: Array, *new: Array) -> Array:
    """Return rows in the order of their places, without those of files that are gone."""
    import numpy as np

    if gone:
        known = known[~np.isin(known["place"] >> _ROW_BITS, list(gone))]
    joined = np.concatenate([known, *new])
    places = joined["place"]
    return joined if np.all(places[:-1] <= places[1:]) else joined[np.argsort(places, kind="stable")]


def _find_first(results: Array, places: Array) -> Array:
    """Return the index of the first result at each place; -1: there is none."""
    import numpy as np

    index = np.searchsorted(results["place"], places)
    return np.where(np.append(results["place"], -1)[index] == places, index, -1)


def read_rows(folder: Path, query: Query) -> Iterator[SampleRow]:
    """Yield the samples of a log that match, newest step first, within a step in the order of the data; neither `text`
    nor `order` is considered."""
    for file in filter(query.reads, reversed(list_trajectory_files(folder))):
        index = LogIndex(folder)
        index.read(files=[file])
        rows = {*(index.select(replace(query, order="")) & (1 << _ROW_BITS) - 1).tolist()}
        try:
            for number, values in enumerate(read_values(file.path) if rows or index.damaged else ()):
                if number in rows:
                    yield SampleRow.model_validate(values)
        except DamagedFileError as error:
            if query.step is not None:
                raise
            say(f"warning: {error}; its samples are left out")


def _read_table(path: Path, columns: Sequence[str]) -> Any:
    """Return an arrow table of these columns; None if the file was deleted or cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=list(columns))
    except (OSError, pa.ArrowException):
        return None
