"""Jobs on two CPU cores: do they learn, and what changes it? Three sets of variants.

`schedules`: the demo with synchronous, onPolicy, bounded with maxStaleness 1, 2 and 4, and bounded 4 without importance
weights. `algorithms`: the demo with each `algorithm.type`. `agents`: the examples with tools, and the one with a
simulated user: with the rewards of its turns, with the same total at the end, and with one answer.

Prints the held-out accuracy before and after, writes docs/images/NAME-learning.png, and as the last line one JSON
object. A run takes 2 to 12 minutes on 2 cores: --seeds, --steps and --only shorten the whole, and --resume keeps
the runs that have ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich.console import Console
from rich.table import Table
from run_job import QUICKSTART, measure_job

from rljob_api.manifest.algorithm import AlgorithmType

ROOT = Path(__file__).parents[1]
_ROW_FILE = "row.json"


class Variant(NamedTuple):
    overrides: Mapping[str, object] = {}
    """Fields of the spec."""
    job: Path = QUICKSTART
    accuracy: str = "exact"
    """The held-out metric that is compared."""


def bounded(max_staleness: int) -> dict[str, object]:
    return {"schedule.type": "bounded", "schedule.maxStaleness": max_staleness}


EXAMPLES = ROOT / "examples"
SCHEDULES = {
    "synchronous": Variant({"schedule.type": "synchronous"}),
    "onPolicy": Variant({"schedule.type": "onPolicy"}),
    "bounded 1": Variant(bounded(1)),
    "bounded 2": Variant(bounded(2)),
    "bounded 4": Variant(bounded(4)),
    "bounded 4, no correction": Variant(bounded(4) | {"algorithm.correction.type": "none"}),
}
ALGORITHMS = {name: Variant({"algorithm.type": name}) for name in get_args(AlgorithmType)} | {
    "dapo, no punishment": Variant({"algorithm.type": "dapo", "algorithm.truncated.answers": "train"})
}
_COST_AT_END = {"agent.user.function.kwargs.cost": 0, "rewards[0].function.kwargs.cost": 0.1}
AGENTS = {
    "feedback, rewards of turns": Variant({}, EXAMPLES / "guess/rljob.yaml", "found"),
    "feedback, total at the end": Variant(_COST_AT_END, EXAMPLES / "guess/rljob.yaml", "found"),
    "one answer": Variant({}, EXAMPLES / "guess/single-turn.yaml", "found"),
    "calculator": Variant({}, EXAMPLES / "calculator/rljob.yaml", "right"),
    "code sandbox": Variant({}, EXAMPLES / "code-sandbox/rljob.yaml", "right"),
}
VARIANTS: dict[str, dict[str, Variant]] = {"schedules": SCHEDULES, "algorithms": ALGORITHMS, "agents": AGENTS}
SEEDS = {"schedules": [0, 1, 2], "algorithms": [0], "agents": [0, 1, 2]}
STEPS = {"schedules": None, "algorithms": 30, "agents": None}
"""None: those of the job. After those of the demo some algorithms still learn fast."""


def run_variant(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a job once. Raise CalledProcessError if it fails."""
    variant = VARIANTS[arguments.what][name]
    length = f"-{arguments.steps}-steps" if arguments.steps else ""  # --resume must not mix runs of other lengths
    folder = arguments.dir / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}{length}"
    kept = folder / _ROW_FILE
    if arguments.resume and kept.exists():
        row: dict[str, Any] = json.loads(kept.read_text())
        return row
    overrides = {**variant.overrides, "schedule.seed": seed}
    if arguments.steps:
        overrides["schedule.steps"] = arguments.steps
    found = measure_job(variant.job, folder, overrides)
    before, after, steps = found.before[variant.accuracy], found.after[variant.accuracy], found.steps
    row = {
        "seed": seed,
        "seconds": found.seconds,
        "before": found.before,
        "after": found.after,
        "accuracy_before": before,
        "accuracy_after": after,
        "gain": after - before,
        # Means over all steps, to see how far off-policy the variant was.
        "staleness_mean": _mean_known(step.staleness_mean for step in steps),
        "mismatch_kl": _mean_known(step.mismatch_kl for step in steps),
        "effective_sample_share": _mean_known(step.effective_sample_share for step in steps),
        "corrected_share": _mean_known(step.corrected_share for step in steps),
        "staleness_max": max(step.staleness_max or 0 for step in steps),
        "accuracy_by_step": [step.components.get(variant.accuracy) for step in steps],
    }
    kept.write_text(json.dumps(row))
    return row


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def run_all(names: list[str], arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run seed by seed, so that what a machine does in an hour meets all variants."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    num_runs, console, started_at = len(names) * len(arguments.seeds), Console(stderr=True), time.monotonic()
    for seed in arguments.seeds:
        for name in names:
            row = run_variant(name, seed, arguments)
            results[name].append(row)
            num_done = sum(map(len, results.values()))
            left = (time.monotonic() - started_at) / num_done * (num_runs - num_done) / 60
            accuracy = f"{row['accuracy_before']:.3f} -> {row['accuracy_after']:.3f}"
            console.print(f"{num_done}/{num_runs} {name}, seed {seed}: {accuracy}; about {left:.0f} min left")
    return results


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    after = [row["accuracy_after"] for row in rows]
    return {
        "accuracy_after_mean": statistics.mean(after),
        "accuracy_after_std": statistics.stdev(after) if len(after) > 1 else None,
        "min_gain": min(row["gain"] for row in rows),
        "runs": rows,
    }


def print_table(results: Mapping[str, list[dict[str, Any]]]) -> None:
    header = ("variant", "before", "after, by seed", "mean", "staleness mean, max", "mismatch KL", "effective sample")
    table = Table(*header, title="Held-out accuracy")
    for name, rows in results.items():
        after = [row["accuracy_after"] for row in rows]
        table.add_row(
            name,
            f"{statistics.mean(row['accuracy_before'] for row in rows):.3f}",
            ", ".join(f"{value:.3f}" for value in after),
            f"{statistics.mean(after):.3f}",
            f"{_mean(rows, 'staleness_mean')}, {max(row['staleness_max'] for row in rows)}",
            _mean(rows, "mismatch_kl"),
            _mean(rows, "effective_sample_share"),
        )
    Console(width=140).print(table)


def _mean(rows: list[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    return f"{statistics.mean(values):.3g}" if values else "-"


def draw(results: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw each variant's held-out accuracy by seed, and that of its training samples by step. Not the rewards: they
    have another scale where turns have rewards, too."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), width_ratios=[2, 3])
    for place, (name, rows) in enumerate(results.items()):
        after = [row["accuracy_after"] for row in rows]
        [line] = left.plot([place] * len(after), after, "o", ms=5)
        left.plot([place - 0.25, place + 0.25], [statistics.mean(after)] * 2, color=line.get_color(), lw=2)
        curves = zip(*(row["accuracy_by_step"] for row in rows), strict=False)
        known = [[value for value in values if value is not None] for values in curves]
        means = [statistics.mean(values) if values else float("nan") for values in known]
        right.plot(range(1, len(means) + 1), means, ".-", lw=1.2, label=name, color=line.get_color())
    before = [statistics.mean(row["accuracy_before"] for row in rows) for rows in results.values()]
    places = range(len(results))
    left.hlines(before, [x - 0.3 for x in places], [x + 0.3 for x in places], "#969696", "--", lw=1.5, label="before")
    left.set_xticks(range(len(results)), [name.replace(", ", ",\n") for name in results], fontsize=7)
    left.set_ylabel("held-out accuracy, by seed and mean")
    left.set_ylim(0, 1)
    left.legend(fontsize=7)
    right.set_xlabel("step")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set_ylabel("accuracy of training samples, mean over seeds")
    right.legend(fontsize=7)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 for algorithms, else 0 1 2")
    parser.add_argument("--steps", type=int, help="steps per run; default: 30 for algorithms, else the job's")
    parser.add_argument("--only", nargs="+", help="variants to run")
    parser.add_argument("--resume", action="store_true", help="keep the runs that have ended")
    parser.add_argument("--plot", type=Path, help="default: docs/images/NAME-learning.png")
    parser.add_argument("--dir", type=Path, help="default: runs/bench-NAME")
    arguments = parser.parse_args()
    names = arguments.only or list(VARIANTS[arguments.what])
    if unknown := set(names) - VARIANTS[arguments.what].keys():
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are: {'; '.join(VARIANTS[arguments.what])}")
    arguments.seeds = arguments.seeds or SEEDS[arguments.what]
    arguments.steps = arguments.steps or STEPS[arguments.what]
    arguments.dir = arguments.dir or ROOT / f"runs/bench-{arguments.what}"
    results = run_all(names, arguments)
    print_table(results)
    draw(results, arguments.plot or ROOT / f"docs/images/{arguments.what}-learning.png")
    print(json.dumps({name: summarize(rows) for name, rows in results.items()}))


if __name__ == "__main__":
    main()
