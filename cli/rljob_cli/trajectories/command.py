"""`rljob trajectories`: the samples of a run and their scores, filtered, or two runs side by side. Reads, never writes.

Owns finding the log of a run, the filters and the comparison; leaves the tables to `trajectory_tables`, and what the
columns mean to the trainer, which writes them (docs/trajectories.md). Invariant: an invalid result is shown with its
reason and is in no mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rljob_api.errors import UserError

Row = dict[str, Any]
_BATCH_ROWS = 512
_FORMAT_KEY, _FORMAT = b"rljob.trajectories", b"1"
_TABLE_LIMIT = 20
_DEFAULT_DIRECTORY = Path("runs")


@dataclass(frozen=True)
class Filter:
    """Which samples are wanted. None: any."""

    step: int | None = None
    lane: str | None = None
    reward: str | None = None
    """Scores and validity are those of this reward; None: the weighted sum, and of any."""
    invalid: bool = False
    min_score: float | None = None
    max_score: float | None = None
    group: int | None = None

    def takes(self, row: Row) -> bool:
        """Whether a row is wanted; `step` and `lane` were looked at by its file's name."""
        if self.group is not None and row["group"] != self.group:
            return False
        rewards = [reward for reward in row["rewards"] if self.reward in (None, reward["name"])]
        if not rewards or (self.invalid and all(reward["valid"] for reward in rewards)):
            return False
        score = rewards[0]["score"] if self.reward else row["score"]
        if self.min_score is None and self.max_score is None:
            return True
        low, high = self.min_score, self.max_score
        return score is not None and (low is None or score >= low) and (high is None or score <= high)


class LogFile(NamedTuple):
    """One file of the log. They sort by age."""

    step: int
    lane: str
    path: Path


def find_log(run: str, directory: Path = _DEFAULT_DIRECTORY) -> Path:
    """The folder of the log, of a run's folder, a job's file or a job's name. Raises UserError where there is none."""
    given = Path(run)
    if given.is_file():
        given = directory / _read_name(given)
    elif not given.exists() and given.name == run:
        given = directory / run
    for folder in (given / "trajectories", given):
        if _list_files(folder):
            return folder
    if not given.exists():
        raise UserError(f"{given}: no such run; give its folder, its job file, or --dir where its folder is in")
    raise UserError(
        f"{given / 'trajectories'}: no step is there yet; a run writes one file a step unless "
        "spec.tracking.trajectoriesMiB is 0"
    )


def _read_name(path: Path) -> str:
    """metadata.name of a file's RLJob; of others only this is wanted, valid or not."""
    try:
        documents = [d for d in yaml.safe_load_all(path.read_text()) if isinstance(d, dict)]
        return str(next(d for d in documents if d.get("kind") == "RLJob")["metadata"]["name"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, StopIteration, KeyError, TypeError):
        raise UserError(f"{path}: holds no RLJob; give a run's folder or a job's file") from None


def _list_files(folder: Path) -> list[LogFile]:
    found = []
    for path in folder.glob("step-*.*.parquet"):
        step, _, lane = path.name.removeprefix("step-").removesuffix(".parquet").partition(".")
        if step.isdigit():
            found.append(LogFile(int(step), lane, path))
    return sorted(found)


def read_rows(folder: Path, wanted: Filter) -> Iterator[Row]:
    """The wanted rows, of the newest step first, in a step by group and sample."""
    files = [
        file
        for file in reversed(_list_files(folder))
        if wanted.step in (None, file.step) and wanted.lane in (None, file.lane)
    ]
    for file in files:
        yield from (row for row in _read_file(file.path) if wanted.takes(row))


def _read_file(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("reading the trajectory log needs pyarrow: pip install pyarrow") from None
    try:
        with pq.ParquetFile(path) as file:
            if (file.schema_arrow.metadata or {}).get(_FORMAT_KEY) != _FORMAT:
                raise UserError(f"{path}: was written by another version of rljob; use that one's `rljob trajectories`")
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from (_plain(row) for row in batch.to_pylist())
    except FileNotFoundError:
        return  # the run that is under way has made room, or does the step again
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}; remove it to see the other steps") from None


def _plain(row: Row) -> Row:
    """A row as JSON would have it: components as an object."""
    rewards = [{**reward, "components": dict(reward["components"] or [])} for reward in row["rewards"] or []]
    return {**row, "rewards": rewards}


def curves_of(row: Row) -> dict[str, float]:
    """All numbers that a sample was scored with: score, REWARD, REWARD/COMPONENT. What is invalid has none."""
    curves = {} if row["score"] is None else {"score": row["score"]}
    for reward in row["rewards"]:
        if reward["valid"]:
            curves[reward["name"]] = reward["score"]
            curves |= {f"{reward['name']}/{name}": value for name, value in reward["components"].items()}
    return curves


# ---- two runs ----


@dataclass
class Side:
    """What one run made of one prompt."""

    num_samples: int = 0
    num_invalid: int = 0
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.num_samples += 1
        self.num_invalid += any(not reward["valid"] for reward in row["rewards"])
        for name, value in curves_of(row).items():
            self.values.setdefault(name, []).append(value)

    @property
    def means(self) -> dict[str, float]:
        return {name: math.fsum(values) / len(values) for name, values in self.values.items()}


@dataclass(frozen=True)
class Pair:
    """A prompt that both runs have."""

    prompt: str
    ground_truth: str | None
    a: Side
    b: Side

    def difference(self, curve: str) -> float | None:
        """b minus a; None where one of them has no valid value."""
        before, after = self.a.means.get(curve), self.b.means.get(curve)
        return None if before is None or after is None else after - before


@dataclass(frozen=True)
class Comparison:
    """Prompts of two runs, those with the largest difference of the score first."""

    pairs: list[Pair]
    num_only_a: int
    num_only_b: int

    @property
    def curves(self) -> list[str]:
        """Those that both runs have, score first, then by name."""
        names = {name for pair in self.pairs for name in {*pair.a.values} & {*pair.b.values}}
        return sorted(names, key=lambda name: (name != "score", name))


def compare(rows_a: Iterable[Row], rows_b: Iterable[Row]) -> Comparison:
    """Match by prompt and answer: rows of two data sets may have other numbers."""
    sides: list[dict[tuple[str, str | None], Side]] = [{}, {}]
    for side, rows in zip(sides, (rows_a, rows_b), strict=True):
        for row in rows:
            side.setdefault((row["prompt"], row["ground_truth"]), Side()).add(row)
    a, b = sides
    pairs = [Pair(*key, a[key], b[key]) for key in a if key in b]
    pairs.sort(key=lambda pair: -abs(pair.difference("score") or 0.0))
    return Comparison(pairs, len(a.keys() - b.keys()), len(b.keys() - a.keys()))


def choose_steps(folder: Path, wanted: Filter) -> Filter:
    """What of a run to compare where no step was named: its last evaluation; in training each step has other prompts,
    so there all of them."""
    if wanted.step is not None or wanted.lane != "eval":
        return wanted
    steps = [file.step for file in _list_files(folder) if file.lane == "eval"]
    return replace(wanted, step=max(steps)) if steps else wanted


def choose_lane(folders: Iterable[Path]) -> str:
    """eval where every run has one: there, all prompts meet."""
    return "eval" if all(any(file.lane == "eval" for file in _list_files(folder)) for folder in folders) else "train"


# ---- the command ----


def trajectories_command(
    arguments: list[str], wanted: Filter, *, directory: Path, limit: int | None, full: bool, output: str
) -> int:
    """Show one run's samples, or compare two runs' (`diff A B`)."""
    if output not in ("table", "json"):
        raise UserError(f"--output must be table or json, got {output}")
    if wanted.lane not in (None, "train", "eval"):
        raise UserError(f"--lane must be train or eval, got {wanted.lane}")
    if limit is None:
        limit = _TABLE_LIMIT if output == "table" else 0
    if arguments[0] == "diff":
        if len(arguments) != 3:
            raise UserError(f"diff takes two runs, got {len(arguments) - 1}")
        return _diff(arguments[1:], wanted, directory, limit or None, full, output)
    if len(arguments) != 1:
        raise UserError("give one run, or: diff RUN_A RUN_B")
    return _show(find_log(arguments[0], directory), wanted, limit or None, full, output)


def _show(folder: Path, wanted: Filter, limit: int | None, full: bool, output: str) -> int:
    rows = read_rows(folder, wanted)
    if output == "json":
        for row in islice(rows, limit):
            print(json.dumps(row, ensure_ascii=False))
        return 0
    from rljob_cli.trajectories import tables as trajectory_tables

    shown = list(islice(rows, limit))
    trajectory_tables.print_samples(shown, full=full, has_more=next(rows, None) is not None)
    return 0


def _diff(runs: list[str], wanted: Filter, directory: Path, limit: int | None, full: bool, output: str) -> int:
    folders = [find_log(run, directory) for run in runs]
    if wanted.lane is None:
        wanted = replace(wanted, lane=choose_lane(folders))
    filters = [choose_steps(folder, wanted) for folder in folders]
    comparison = compare(*(read_rows(folder, filter_) for folder, filter_ in zip(folders, filters, strict=True)))
    if not comparison.pairs:
        raise UserError(
            f"{runs[0]} and {runs[1]} have no prompt in common in lane {wanted.lane}"
            + (f", step {wanted.step}" if wanted.step is not None else "")
            + ": give another --lane or --step"
        )
    if output == "json":
        for pair in islice(comparison.pairs, limit):
            print(json.dumps(_describe_pair(pair, comparison.curves), ensure_ascii=False))
        return 0
    from rljob_cli.trajectories import tables as trajectory_tables

    steps = [filter_.step for filter_ in filters]
    trajectory_tables.print_comparison(comparison, runs, wanted.lane or "", steps, limit=limit, full=full)
    return 0


def _describe_pair(pair: Pair, curves: list[str]) -> Row:
    return {
        "prompt": pair.prompt,
        "ground_truth": pair.ground_truth,
        "a": _describe_side(pair.a),
        "b": _describe_side(pair.b),
        "difference": {name: pair.difference(name) for name in curves},
    }


def _describe_side(side: Side) -> Row:
    return {"num_samples": side.num_samples, "num_invalid": side.num_invalid, "means": side.means}
