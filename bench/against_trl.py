"""Does it learn as TRL does? The quickstart's sums with several seeds, RLJob under each schedule and TRL's GRPOTrainer.

Both have the same model, prompts, reward, group size, learning rate and samples per step. Held-out accuracy is that of
greedy answers, every few steps; evaluations take no part of the seconds. Intervals are Student's, of the mean over
seeds. Equal gradients do not show a fault of a schedule: stale weights, samples that train twice, updates that a
rollout never gets. Curves of accuracy do.

Seconds compare only if nothing else runs on the machine; steps and samples do in any case. Draws
docs/images/trl-learning.png; last line: one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.console import Console
from rich.table import Table
from run_job import QUICKSTART, measure_job
from trl_run import run_trl

ROOT = Path(__file__).parents[1]
TRL = "TRL"
SCHEDULES: dict[str, dict[str, object]] = {
    "synchronous": {"schedule.type": "synchronous"},
    "onPolicy": {"schedule.type": "onPolicy"},
    "oneStepOff": {"schedule.type": "oneStepOff"},
    "bounded 2": {"schedule.type": "bounded", "schedule.maxStaleness": 2},
}
EVALUATE_EVERY = 3
# Student's t, two-sided 95 %, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


class Point(NamedTuple):
    """An evaluation during one run."""

    step: int
    """Finished steps."""
    samples: int
    """That had been trained."""
    seconds: float
    """Time of the steps until then."""
    accuracy: float


def run(name: str, seed: int, steps: int, folder: Path) -> list[Point]:
    """Run once. Raise CalledProcessError if it fails."""
    spec = yaml.safe_load(QUICKSTART.read_text())["spec"]
    samples = spec["schedule"]["promptsPerStep"] * spec["algorithm"]["groupSize"]
    rate = float(spec["algorithm"]["optimizer"]["learningRate"])
    if name == TRL:
        trl = run_trl(folder, steps=steps, seed=seed, learning_rate=rate, evaluate_every=EVALUATE_EVERY)
        ends = [0.0, *itertools.accumulate(trl["step_seconds"])]
        return [Point(step, step * samples, ends[step], value) for step, value in trl["accuracy"]]
    overrides: dict[str, object] = {
        "schedule.steps": steps,
        "schedule.seed": seed,
        "evaluation.everySteps": EVALUATE_EVERY,
        "checkpoint.exportPolicy": "never",
        "checkpoint.everySteps": steps,
    }
    found = measure_job(QUICKSTART, folder, overrides | SCHEDULES[name])
    spent = ((step.step_seconds or 0.0) - step.phase_seconds.get("evaluate", 0.0) for step in found.steps)
    ends = [0.0, *itertools.accumulate(spent)]
    return [
        Point(each.step, each.step * samples, ends[each.step], each.means["exact"] or 0.0) for each in found.evaluations
    ]


def run_all(arguments: argparse.Namespace) -> dict[str, list[list[Point]]]:
    """Run seed by seed, so that what a machine does in an hour meets all variants."""
    names = arguments.only or [*SCHEDULES, TRL]
    results: dict[str, list[list[Point]]] = {name: [] for name in names}
    console, started_at, runs = Console(stderr=True), time.monotonic(), list(itertools.product(arguments.seeds, names))
    for number, (seed, name) in enumerate(runs, 1):
        folder = arguments.dir / f"{name.replace(' ', '-')}-{seed}-{arguments.steps}-steps"
        kept = folder / "curve.json"
        if not (arguments.resume and kept.exists()):
            kept.write_text(json.dumps(run(name, seed, arguments.steps, folder)))
        curve = [Point(*values) for values in json.loads(kept.read_text())]
        results[name].append(curve)
        left = (time.monotonic() - started_at) / number * (len(runs) - number) / 60
        change = f"{curve[0].accuracy:.3f} -> {curve[-1].accuracy:.3f}"
        console.print(f"{number}/{len(runs)} {name}, seed {seed}: {change}; about {left:.0f} min left")
    return results


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean, and half of the width of its 95 % interval; 0 for one value."""
    if len(values) < 2:
        return values[0], 0.0
    width = STUDENT[min(len(values) - 1, max(STUDENT))] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), width


def average(curves: list[list[Point]]) -> list[dict[str, float]]:
    """Return means over seeds at each evaluation."""
    found = []
    for points in zip(*curves, strict=True):
        mean, width = interval([point.accuracy for point in points])
        seconds = statistics.mean(point.seconds for point in points)
        common = {"step": points[0].step, "samples": points[0].samples, "seconds": round(seconds, 1)}
        found.append(common | {"accuracy": round(mean, 4), "half_interval": round(width, 4)})
    return found


def draw(results: Mapping[str, list[dict[str, float]]], path: Path, axes_of: tuple[str, ...]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(axes_of), figsize=(1 + 4.5 * len(axes_of), 4.2), sharey=True)
    for axis, what in zip(axes, axes_of, strict=True):
        for name, points in results.items():
            x, means, widths = ([point[key] for point in points] for key in (what, "accuracy", "half_interval"))
            [line] = axis.plot(x, means, "--" if name == TRL else "-", marker=".", lw=1.4, label=name)
            low, high = ([m + s * w for m, w in zip(means, widths, strict=True)] for s in (-1, 1))
            axis.fill_between(x, low, high, color=line.get_color(), alpha=0.12, lw=0)
        axis.set_xlabel(what)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out accuracy, mean and 95% interval")
    axes[0].set_ylim(0, 1)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--only", nargs="+", choices=[*SCHEDULES, TRL], help="variants to run")
    parser.add_argument("--resume", action="store_true", help="keep the runs that have ended")
    parser.add_argument("--busy", action="store_true", help="the machine does other work: draw no seconds")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/images/trl-learning.png")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/bench-against-trl")
    arguments = parser.parse_args()
    results = {name: average(curves) for name, curves in run_all(arguments).items()}
    table = Table("step", *results, title=f"Held-out accuracy, mean of {len(arguments.seeds)} seeds +- 95% interval")
    for points in zip(*results.values(), strict=True):
        cells = (f"{point['accuracy']:.3f} +- {point['half_interval']:.3f}" for point in points)
        table.add_row(str(points[0]["step"]), *cells)
    Console(width=140).print(table)
    draw(results, arguments.plot, ("step", "samples") if arguments.busy else ("step", "samples", "seconds"))
    print(json.dumps({"seeds": arguments.seeds, "curves": results}))


if __name__ == "__main__":
    main()
