"""The demo with each schedule, or with each algorithm: does it learn, and do stale tokens change that?

`schedules`: synchronous, onPolicy, bounded with maxStaleness 1, 2 and 4, and bounded 4 without importance weights, with
three seeds. `algorithms`: each `algorithm.type` with the settings of the demo and one seed. Prints the held-out
accuracy before and after, writes docs/images/NAME-learning.png, and as the last line one JSON object. A run takes two
to five minutes on 2 cores: --seeds, --steps and --only shorten the whole, and --resume keeps the runs that have ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from run_job import read_records, run_quickstart

from rljob_api.manifest.algorithm import AlgorithmType

ROOT = Path(__file__).parents[1]
_ROW_FILE = "row.json"


def bounded(max_staleness: int) -> dict[str, object]:
    return {"schedule.type": "bounded", "schedule.maxStaleness": max_staleness}


SCHEDULES: dict[str, dict[str, object]] = {
    "synchronous": {"schedule.type": "synchronous"},
    "onPolicy": {"schedule.type": "onPolicy"},
    "bounded 1": bounded(1),
    "bounded 2": bounded(2),
    "bounded 4": bounded(4),
    "bounded 4, no correction": bounded(4) | {"algorithm.correction.type": "none"},
}
ALGORITHMS: dict[str, dict[str, object]] = {name: {"algorithm.type": name} for name in get_args(AlgorithmType)}
VARIANTS = {"schedules": SCHEDULES, "algorithms": ALGORITHMS}
SEEDS = {"schedules": [0, 1, 2], "algorithms": [0]}
STEPS = {"schedules": None, "algorithms": 30}
"""None: those of the demo, after which some algorithms still learn fast."""
_NUMBERS = ("staleness_mean", "mismatch_kl", "effective_sample_share", "corrected_share")
"""Means over all steps of a variant, to see how far off-policy it was."""


def run_variant(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the demo once. Raise CalledProcessError if it fails."""
    length = f"-{arguments.steps}-steps" if arguments.steps else ""  # --resume must not mix runs of other lengths
    folder = arguments.dir / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}{length}"
    kept = folder / _ROW_FILE
    if arguments.resume and kept.exists():
        row: dict[str, Any] = json.loads(kept.read_text())
        return row
    overrides = VARIANTS[arguments.what][name] | {"schedule.seed": seed}
    if arguments.steps:
        overrides["schedule.steps"] = arguments.steps
    row = run_quickstart(folder, overrides)
    steps = read_records(Path(row.pop("summary")), "step")
    numbers = {key: [step[key] for step in steps if step.get(key) is not None] for key in _NUMBERS}
    means = {key: statistics.mean(values) if values else None for key, values in numbers.items()}
    staleness = [step.get("staleness_max") or 0 for step in steps]
    rewards = [step["reward"] for step in steps]
    row = {"seed": seed, **row, **means, "staleness_max": max(staleness), "rewards": rewards}
    kept.write_text(json.dumps(row))
    return row


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
            accuracy = f"{row['exact_before']:.3f} -> {row['exact_after']:.3f}"
            console.print(f"{num_done}/{num_runs} {name}, seed {seed}: {accuracy}; about {left:.0f} min left")
    return results


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    after = [row["exact_after"] for row in rows]
    return {
        "exact_after_mean": statistics.mean(after),
        "exact_after_std": statistics.stdev(after) if len(after) > 1 else None,
        "min_gain": min(row["gain"] for row in rows),
        "runs": rows,
    }


def print_table(results: Mapping[str, list[dict[str, Any]]]) -> None:
    header = ("variant", "before", "after, by seed", "mean", "staleness mean, max", "mismatch KL", "effective sample")
    table = Table(*header, title="Held-out accuracy of the quickstart, greedy, exact")
    for name, rows in results.items():
        after = [row["exact_after"] for row in rows]
        table.add_row(
            name,
            f"{statistics.mean(row['exact_before'] for row in rows):.3f}",
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
    """Draw each variant's accuracy by seed, and the mean reward over seeds by step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), width_ratios=[2, 3])
    for place, (name, rows) in enumerate(results.items()):
        after = [row["exact_after"] for row in rows]
        [line] = left.plot([place] * len(after), after, "o", ms=5)
        left.plot([place - 0.25, place + 0.25], [statistics.mean(after)] * 2, color=line.get_color(), lw=2)
        curves = zip(*(row["rewards"] for row in rows), strict=False)
        known = [[value for value in values if value is not None] for values in curves]
        means = [statistics.mean(values) if values else float("nan") for values in known]
        right.plot(range(1, len(means) + 1), means, ".-", lw=1.2, label=name, color=line.get_color())
    before = statistics.mean(row["exact_before"] for rows in results.values() for row in rows)
    left.axhline(before, color="#969696", lw=1, ls="--", label="before")
    left.set_xticks(range(len(results)), [name.replace(", ", ",\n") for name in results], fontsize=7)
    left.set_ylabel("held-out accuracy (exact), by seed and mean")
    left.set_ylim(0, 1)
    left.legend(fontsize=7)
    right.set_xlabel("step")
    right.set_ylabel("training reward, mean over seeds")
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
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2 for schedules, 0 for algorithms")
    parser.add_argument("--steps", type=int, help="steps per run; default: the demo's for schedules, 30 for algorithms")
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
