"""The comparison of two runs, by the prompts that both have.

Invariants: an invalid result is in no mean; no mean is over two evaluation sets, which sample and score a prompt
differently, or over two seats, whose scores may add up to 0.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rljob_api.run.folder import list_trajectory_files
from rljob_api.run.trajectories import SampleRow
from rljob_cli.trajectories.index import Query
from rljob_cli.trajectories.log import curves_of


@dataclass
class Side:
    num_samples: int = 0
    num_invalid: int = 0
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, row: SampleRow) -> None:
        self.num_samples += 1
        self.num_invalid += any(not result.valid for result in row.rewards)
        for name, value in curves_of(row).items():
            self.values.setdefault(name, []).append(value)

    @property
    def means(self) -> dict[str, float]:
        return {name: statistics.fmean(values) for name, values in self.values.items()}


@dataclass(frozen=True)
class Pair:
    prompt: str
    ground_truth: str | None
    set: str | None
    """Name of the evaluation set. None: training."""
    seat: str | None
    """None: episodes have one player."""
    a: Side
    b: Side

    def has(self, curve: str) -> bool:
        return curve in self.a.values and curve in self.b.values

    def difference(self, curve: str) -> float | None:
        """Return b minus a; None if either has no valid value."""
        return self.b.means[curve] - self.a.means[curve] if self.has(curve) else None


@dataclass(frozen=True)
class Comparison:
    """Prompts of two runs, largest difference of the score first."""

    pairs: list[Pair]
    num_only_a: int
    num_only_b: int

    @property
    def curves(self) -> list[str]:
        """Return the curves that both runs have: score first, then by name."""
        names = {name for pair in self.pairs for name in {*pair.a.values} & {*pair.b.values}}
        return sorted(names, key=lambda name: (name != "score", name))


def compare(rows_a: Iterable[SampleRow], rows_b: Iterable[SampleRow]) -> Comparison:
    """Match by prompt and answer, since row numbers may differ between datasets, within each set and seat."""
    sides: list[dict[tuple[str, str | None, str | None, str | None], Side]] = [{}, {}]
    for side, rows in zip(sides, (rows_a, rows_b), strict=True):
        for row in rows:
            side.setdefault((row.prompt, row.ground_truth, row.set, row.seat), Side()).add(row)
    a, b = sides
    pairs = [Pair(*key, a[key], b[key]) for key in a if key in b]
    pairs.sort(key=lambda pair: -abs(pair.difference("score") or 0.0))
    return Comparison(pairs, len(a.keys() - b.keys()), len(b.keys() - a.keys()))


def choose_steps(folder: Path, query: Query) -> Query:
    """Without a step, select the last evaluation; of training all steps, since each has other prompts."""
    if query.step is not None or query.lane != "eval":
        return query
    steps = [file.step for file in list_trajectory_files(folder) if file.lane == "eval"]
    return replace(query, step=max(steps)) if steps else query


def choose_lane(folders: Iterable[Path]) -> str:
    """Return eval if all runs have evaluations, since those share their prompts."""
    return (
        "eval"
        if all(any(file.lane == "eval" for file in list_trajectory_files(folder)) for folder in folders)
        else "train"
    )
