"""A simulated day of one reward that jobs share: RLJob's autoscaler, HPA on CPU, and fixed numbers of replicas.

A step generates for 41 s and trains for 210 s, group by group, and has 1,280 samples with a reward of U(1, 40) s. The
day has bursts of one and of two jobs, an hour with a scorer that is three times slower, Pods that die, and an hour with
too few nodes. Pods take 20 to 60 s to start. Prints a table and one JSON object, and writes
docs/images/autoscale-day.png.

    step / floor   a step's time over that with a reward of 0 s: median, p95, and mean
    reaction       from a burst's first sample to the slots that Little's law requires: mean and p95
    wasted         paid slot-hours (since the Pod has a node) without an execution, and their share
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoscale.scalers import FixedScaler, HorizontalPodAutoscaler, RLJobScaler
from autoscale.simulation import Day, JobSpec, Scaler, Simulation
from rich.console import Console
from rich.table import Table

from rljob_api.manifest.scaling import Autoscaling

HOUR = 3600.0
PLOT_PATH = Path(__file__).parents[1] / "docs/images/autoscale-day.png"
SLOTS, MAX_REPLICAS = 16, 40
DAY = Day(
    jobs=(
        JobSpec("night", 0.5 * HOUR, 6.5 * HOUR, 1280),
        JobSpec("morning", 5.0 * HOUR, 10.0 * HOUR, 1280),
        JobSpec("noon", 12.0 * HOUR, 17.0 * HOUR, 1280),
        JobSpec("evening", 19.0 * HOUR, 22.0 * HOUR, 1280),
    ),
    slots=SLOTS,
    seconds=24 * HOUR,
    slow=(13.0 * HOUR, 14.0 * HOUR, 3.0),
    deaths=tuple((15.0 + minute / 60) * HOUR for minute in range(0, 60, 10)),
    shortage=(18.5 * HOUR, 19.5 * HOUR, 4),
)


def build_scalers() -> dict[str, Scaler]:
    settings = Autoscaling.model_validate({"minReplicas": 0, "maxReplicas": MAX_REPLICAS})
    return {
        "ours": RLJobScaler(settings, SLOTS),
        "hpa_cpu": HorizontalPodAutoscaler(1, MAX_REPLICAS, SLOTS, cores=1.0),
        "hpa_cpu_waits": HorizontalPodAutoscaler(1, MAX_REPLICAS, SLOTS, cores=0.1),
        "fixed_published": FixedScaler(1280 // 20 // SLOTS),
        "fixed_peak": FixedScaler(20),
    }


LABELS = {
    "ours": "RLJob, 0 to 40 Pods",
    "hpa_cpu": "HPA on CPU, 1 to 40: requests that compute",
    "hpa_cpu_waits": "HPA on CPU, 1 to 40: requests that wait",
    "fixed_published": "fixed: one slot per 20 samples (the published 256 for 5,120)",
    "fixed_peak": "fixed: the demand of two jobs",
}


def summarize(simulation: Simulation) -> dict[str, Any]:
    ratios = sorted(step.seconds / step.floor_seconds for step in simulation.steps)
    reactions = sorted(step.reaction_seconds for step in simulation.steps)
    wasted = simulation.paid_slot_seconds - simulation.used_slot_seconds
    return {
        "num_steps": len(ratios),
        "step_ratio_median": round(statistics.median(ratios), 3),
        "step_ratio_p95": round(quantile(ratios, 0.95), 3),
        "step_ratio_mean": round(statistics.mean(ratios), 3),
        "reaction_seconds_mean": round(statistics.mean(reactions), 1),
        "reaction_seconds_p95": round(quantile(reactions, 0.95), 1),
        "slot_hours_paid": round(simulation.paid_slot_seconds / HOUR, 1),
        "slot_hours_used": round(simulation.used_slot_seconds / HOUR, 1),
        "slot_hours_wasted": round(wasted / HOUR, 1),
        "wasted_share": round(wasted / simulation.paid_slot_seconds, 3),
        "slot_seconds_paid_per_step": round(simulation.paid_slot_seconds / len(ratios)),
        "num_changes": simulation.num_changes,
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def print_table(results: dict[str, dict[str, Any]]) -> None:
    table = Table("scaler", "steps", "step / floor", "reaction s", "slot-hours wasted", "paid per step", "changes")
    for name, row in results.items():
        table.add_row(
            LABELS[name],
            str(row["num_steps"]),
            f"{row['step_ratio_median']:.2f}, {row['step_ratio_p95']:.2f}, {row['step_ratio_mean']:.2f}",
            f"{row['reaction_seconds_mean']:.0f}, {row['reaction_seconds_p95']:.0f}",
            f"{row['slot_hours_wasted']:.0f} ({row['wasted_share']:.0%})",
            f"{row['slot_seconds_paid_per_step'] / 1000:.1f} k slot-s",
            str(row["num_changes"]),
        )
    Console(width=140).print(table)


def draw(simulations: dict[str, Simulation], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(simulations) + 1, 1, figsize=(13, 2.1 * (len(simulations) + 1)), sharex=True)
    for axis, (name, simulation) in zip(axes, simulations.items(), strict=False):
        hours = [moment / HOUR for moment, *_ in simulation.curves]
        axis.fill_between(hours, [busy for *_, busy in simulation.curves], color="#9ecae1", lw=0, label="busy")
        axis.plot(hours, [ready for _, _, ready, _ in simulation.curves], color="#08519c", lw=1, label="ready")
        axis.plot(hours, [need for _, need, *_ in simulation.curves], color="#d94801", lw=0.6, label="Little's law")
        axis.set_ylabel("slots")
        axis.set_title(LABELS[name], loc="left", fontsize=9)
        axis.set_ylim(0, SLOTS * MAX_REPLICAS * 1.02)
        axes[-1].plot(
            [step.begin / HOUR for step in simulation.steps],
            [step.seconds / step.floor_seconds for step in simulation.steps],
            ".",
            ms=3,
            label=name,
        )
    axes[0].legend(loc="upper right", fontsize=7, ncols=3)
    for axis in axes:
        for begin, end, label in events():
            axis.axvspan(begin, end, color="#f0f0f0", zorder=0)
            if axis is axes[0]:
                axis.text((begin + end) / 2, SLOTS * MAX_REPLICAS * 0.9, label, fontsize=7, ha="center")
    axes[-1].set_yscale("log", base=2)
    axes[-1].set_ylabel("step / floor")
    axes[-1].set_xlabel("hour")
    axes[-1].legend(loc="upper right", fontsize=7, ncols=len(simulations))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def events() -> list[tuple[float, float, str]]:
    return [
        (DAY.slow[0] / HOUR, DAY.slow[1] / HOUR, "scorer 3x slower"),
        (DAY.deaths[0] / HOUR, DAY.deaths[-1] / HOUR, "Pods die"),
        (DAY.shortage[0] / HOUR, DAY.shortage[1] / HOUR, f"room for {DAY.shortage[2]} Pods"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=PLOT_PATH)
    parser.add_argument("--only", nargs="+", choices=list(LABELS), help="scalers to run")
    parser.add_argument("--explain", action="store_true", help="print RLJob's decisions with their explanations")
    arguments = parser.parse_args()
    simulations = {}
    for name, scaler in build_scalers().items():
        if not arguments.only or name in arguments.only:
            simulations[name] = Simulation(DAY, scaler).run()
            if arguments.explain and isinstance(scaler, RLJobScaler):
                for moment, label in scaler.decisions:
                    print(f"{moment / HOUR:6.2f} h  {label}")
    results = {name: summarize(simulation) for name, simulation in simulations.items()}
    print_table(results)
    draw(simulations, arguments.plot)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
