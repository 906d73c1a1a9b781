"""The samples of a log without their texts: what filters and sorts a log that is larger than memory.

Invariants: a file is indexed once for each of its contents; a sample takes about 30 bytes, and each of its results as
many; texts are read only for the samples of one page. A file that the run in progress has deleted has no samples.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
ORDERS = ("", "high", "low", "long", "slow")
"""By step; by score, the highest or lowest first; the longest first; the slowest reward first."""
ORDER_BY = {"latency": "slow", "reward": "high"}
"""What --sort means."""
LANES = ("", "train", "eval")
SHOWN = ("", "best", "worst", "invalid", "truncated")
"""All; the best or the worst of each step; those without a valid score; those that a limit of tokens cut."""
Array = Any
"""An array of numpy, which the extra `data` brings: it is imported only where it is used."""
_SAMPLE = [("place", "i8"), ("group", "i4"), ("set", "i4"), ("score", "f8"), ("truncated", "?"), ("tokens", "i4")]
_RESULT = [("place", "i8"), ("name", "i4"), ("valid", "?"), ("score", "f8"), ("reason", "i4"), ("latency", "f8")]
"""Both are in the order of their places. A place is the number of a file, and in its lower bits the row. Texts are
their codes, and 0 is none. An unknown score is not a number; an unknown latency is 0 seconds."""
_ROW_BITS = 32
_SAMPLES_AS_A_FILE = 250
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


def _number(file: TrajectoryFile) -> int:
    """Ascending by age."""
    return 2 * file.step + (file.lane == "train")


def _fill(columns: Sequence[tuple[str, str]], *values: Sequence[Any]) -> Array:
    import numpy as np

    filled = np.empty(len(values[0]) if values else 0, list(columns))
    for (name, _), each in zip(columns, values, strict=False):
        filled[name] = each
    return filled


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
    _states: dict[int, tuple[int, int]] = field(default_factory=dict)
    _codes: dict[str | None, int] = field(default_factory=lambda: {None: 0})

    @cached_property
    def _samples(self) -> Array:
        return _fill(_SAMPLE)

    @cached_property
    def _results(self) -> Array:
        return _fill(_RESULT)

    def read(self, query: Query = ALL, max_new: float = math.inf) -> None:
        """Read the files that a query reads. `max_new`: of those that were not read before so many are read, or fewer
        large ones, so that the first samples of a long run do not wait for the last ones."""
        self.files = list_trajectory_files(self.folder)
        self.load(query, max_new)

    def load(self, query: Query = ALL, max_new: float = math.inf) -> None:
        """As `read`, of the files that are known."""
        gone, new = self._states.keys() - set(map(_number, self.files)), dict[int, tuple[Array, Array]]()
        self.num_unread = 0
        for file in filter(query.reads, self.files):
            number = _number(file)
            try:
                stat = file.path.stat()
            except OSError:  # the run in progress has deleted it
                gone.add(number)
                continue
            state = (stat.st_size, stat.st_mtime_ns)
            if self._states.get(number) == state:
                continue
            if number in self._states:
                gone.add(number)
            if max_new <= 0:
                self.num_unread += 1
                continue
            new[number] = self._read_file(file)
            max_new -= 1 + len(new[number][0]) // _SAMPLES_AS_A_FILE
            self._states[number] = state
        for number in gone - new.keys():
            self._states.pop(number, None)
        if gone or new:
            self._samples, self._results = (
                _join(known, gone, [each[part] for each in new.values()])
                for part, known in enumerate((self._samples, self._results))
            )

    def _read_file(self, file: TrajectoryFile) -> tuple[Array, Array]:
        """Return its samples and their results. It may be of another version, which may have fewer columns."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        table = _read_table(file.path, _COLUMNS)
        is_known = table is not None and {"group", "rewards"} <= {*table.column_names}
        (self.damaged.discard if is_known or not file.path.exists() else self.damaged.add)(file.path.name)
        if not is_known:
            return _fill(_SAMPLE), _fill(_RESULT)
        places = (_number(file) << _ROW_BITS) + np.arange(table.num_rows)

        def column(name: str, of: Any = table) -> list[Any]:
            return of[name].to_pylist() if name in of.column_names else [None] * of.num_rows

        def code(texts: Sequence[str | None]) -> list[int]:
            return [self._codes.setdefault(text, len(self._codes)) for text in texts]

        tokens = [each or 0 for each in column("num_sampled_tokens")]
        samples = _fill(
            _SAMPLE, places, column("group"), code(column("set")), column("score"), column("truncated"), tokens
        )
        rewards = table["rewards"].combine_chunks()
        own = pa.Table.from_struct_array(pc.list_flatten(rewards))
        latencies = zip(column("latency_seconds", own), column("execute_seconds", own), strict=True)
        results = _fill(
            _RESULT,
            places[np.asarray(pc.list_parent_indices(rewards).to_pylist(), "i8")],
            code(column("name", own)),
            column("valid", own),
            column("score", own),
            code(column("reason", own)),
            [(executed if known is None else known) or 0.0 for known, executed in latencies],
        )
        more = list[tuple[Any, ...]]()
        for place, failure, own_reward in zip(places, column("failure"), column("own_reward"), strict=True):
            if failure:
                path, _, cause = failure.partition(": ")
                more.append((place, *code([path]), False, None, *code([cause.partition(": ")[0]]), 0.0))
            elif own_reward is not None:
                more.append((place, *code([RUNNER_SERVICE]), True, own_reward, 0, 0.0))
        return samples, _join(results, (), [_fill(_RESULT, *zip(*more, strict=True))] if more else [])

    def count(self, query: Query) -> int:
        """Return the number of samples in the files that a query reads."""
        return int(self._is_read(query).sum())

    def _is_read(self, query: Query) -> Array:
        numbers = self._samples["place"] >> _ROW_BITS
        is_read = numbers >= 0
        if query.step is not None:
            is_read &= numbers >> 1 == query.step
        if query.lane is not None:
            is_read &= numbers & 1 == (query.lane == "train")
        return is_read

    def select(self, query: Query, *, newest_first: bool = False) -> Array:
        """Return the places of the samples that match, in order; `text` is not considered. `newest_first`: the order of
        the files, within which equal samples stay."""
        import numpy as np

        places, results, kept = self._samples["place"], self._results, self._is_read(query)
        if query.group is not None:
            kept &= self._samples["group"] == query.group
        if query.eval_set is not None:
            kept &= self._samples["set"] == self._codes.get(query.eval_set, -1)
        if query.reward is not None:
            results = results[results["name"] == self._codes.get(query.reward, -1)]
            kept &= _find_first(results, places) >= 0
        if query.reason is not None:
            kept &= _find_first(results[results["reason"] == self._codes.get(query.reason, -1)], places) >= 0
        if query.shown == "invalid":
            kept &= _find_first(results[~results["valid"]], places) >= 0
        if query.shown == "truncated":
            kept &= self._samples["truncated"]
        scores = self._samples["score"]
        if query.reward is not None:
            valid = results[results["valid"]]
            scores = np.append(valid["score"], np.nan)[_find_first(valid, places)]
        if query.low is not None:
            kept &= scores >= query.low
        if query.high is not None:
            kept &= scores <= query.high
        chosen = np.flatnonzero(kept)
        if query.shown in ("best", "worst"):
            chosen = _choose_extremes(chosen, places, scores if query.shown == "worst" else -scores)
        if newest_first:
            chosen = chosen[np.argsort(-(places[chosen] >> _ROW_BITS), kind="stable")]
        if query.order == "slow":
            slowest = results[np.lexsort((-results["latency"], results["place"]))]
            keys = -np.append(slowest["latency"], 0.0)[_find_first(slowest, places)]
        else:
            keys = {"high": -scores, "low": scores, "long": -self._samples["tokens"]}.get(query.order)
        return places[chosen if keys is None else chosen[np.argsort(keys[chosen], kind="stable")]]

    def read_samples(self, places: Array) -> list[SampleRow]:
        """Return the samples with their texts, in the given order, without those whose file was deleted meanwhile."""
        names = [name for name in SampleRow.model_fields if name not in REPLAY_COLUMNS]
        wanted, found = places.tolist(), dict[int, SampleRow]()
        for start, file in self._list_files(places):
            table, own = _read_table(file.path, names), places[places >> _ROW_BITS == start >> _ROW_BITS]
            if table is None or max(own) - start >= table.num_rows:  # a repeated step has replaced it
                continue
            for place in own.tolist():  # Table.take would import pandas, which takes 40 MB
                found[place] = SampleRow.model_validate(table.slice(place - start, 1).to_pylist()[0])
        return [found[place] for place in wanted if place in found]

    def find_text(self, places: Array, text: str) -> Array:
        """Return the samples whose prompt or completion contains a text, whatever its case."""
        import numpy as np
        import pyarrow.compute as pc

        found = list[int]()
        for start, file in self._list_files(places):
            table = _read_table(file.path, ("prompt", "completion", "messages"))
            for column in () if table is None else table.columns:
                mask = pc.match_substring(column, text, ignore_case=True).to_pylist()
                found += [start + row for row, is_in in enumerate(mask) if is_in]
        return places[np.isin(places, np.array(found, "i8"))]

    def _list_files(self, places: Array) -> Iterator[tuple[int, TrajectoryFile]]:
        """Yield the files of places, each with the place of its first row."""
        numbers = {*(places >> _ROW_BITS).tolist()}
        for file in self.files:
            if _number(file) in numbers:
                yield _number(file) << _ROW_BITS, file


def _join(known: Array, gone: Collection[int], new: Sequence[Array]) -> Array:
    """Return rows in the order of their places, without those of files that are gone."""
    import numpy as np

    if gone:
        known = known[~np.isin(known["place"] >> _ROW_BITS, list(gone))]
    joined = np.concatenate([known, *new]) if new else known
    places = joined["place"]
    return joined if np.all(places[:-1] <= places[1:]) else joined[np.argsort(places, kind="stable")]


def _find_first(results: Array, places: Array) -> Array:
    """Return the index of the first result at each place; -1: there is none."""
    import numpy as np

    index = np.searchsorted(results["place"], places)
    return np.where(np.append(results["place"], -1)[index] == places, index, -1)


def _choose_extremes(chosen: Array, places: Array, ranks: Array) -> Array:
    """Return the sample of the least rank of each step; ties go to the first."""
    import numpy as np

    known = chosen[~np.isnan(ranks[chosen])]
    ordered = known[np.lexsort((ranks[known], places[known] >> _ROW_BITS))]
    return ordered[np.unique(places[ordered] >> _ROW_BITS, return_index=True)[1]]


def read_rows(folder: Path, query: Query) -> Iterator[SampleRow]:
    """Yield the samples of a log that match, newest step first, within a step in the order of the data; neither `text`
    nor `order` is considered."""
    for file in filter(query.reads, reversed(list_trajectory_files(folder))):
        index = LogIndex(folder, [file])
        index.load()
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
