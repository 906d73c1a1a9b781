"""The report of a finished run: its summary, a table and a picture of the curves. Imports matplotlib only to draw.

Invariant: the driver's fields are passed through the summary unchanged.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rljob_cli.run.runfolder import Row, split_rows


def build_summary(
    *, name: str, phase: str, driver: Row, rows: list[Row], restarts: dict[str, int], wall_seconds: float
) -> dict[str, Any]:
    """Build summary.json. `driver` is driver-summary.json, empty if the driver wrote none."""
    steps, evals = split_rows(rows)
    known: dict[str, Any] = {
        "accuracy_before": evals[0].get("accuracy") if evals else None,
        "accuracy_after": evals[-1].get("accuracy") if len(evals) > 1 else None,
        "step_rewards": [row.get("reward") for row in steps],
        "phase_seconds": {},
        "samples_trained": None,
        "prompts_trained": [],
        "rewards_served": None,
        "invalid_by_reason": {},
        "weight_digests": {},
    }
    summary = {"name": name, "phase": phase, "wall_seconds": round(wall_seconds, 3), **known, **driver}
    summary["metrics_before"] = driver.get("eval_before", {})
    summary["metrics_after"] = driver.get("eval_after", {})
    by_driver = driver.get("restarts") or {}
    roles = sorted({*restarts, *by_driver})
    summary["restarts"] = {role: restarts.get(role, 0) + by_driver.get(role, 0) for role in roles}
    summary["steps"] = steps[-1]["step"] if steps else 0
    return summary


def build_table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"{summary['name']}: {summary['phase']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _lines(summary):
        table.add_row(name, value)
    return table


def _lines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if before is not None or after is not None:
        yield "held-out accuracy", _from_to(before, after)
    first, last = summary.get("metrics_before") or {}, summary.get("metrics_after") or {}
    for component in sorted({*first, *last}):
        yield f"  {component}", _from_to(first.get(component), last.get(component))
    rewards = [reward for reward in summary.get("step_rewards", []) if reward is not None]
    if rewards:
        yield "reward", f"{_from_to(rewards[0], rewards[-1])} over {len(rewards)} steps"
    phases = {name: s for name, s in (summary.get("phase_seconds") or {}).items() if s}
    parts = [f"{name} {seconds:.1f} s" for name, seconds in sorted(phases.items(), key=lambda item: -item[1])]
    yield "wall time", f"{summary['wall_seconds']:.1f} s" + (f": {', '.join(parts)}" if parts else "")
    if summary.get("samples_trained") is not None:
        yield "samples trained", str(summary["samples_trained"])
    if summary.get("rewards_served") is not None:
        yield "rewards served", f"{summary['rewards_served']}, invalid: {_counts(summary.get('invalid_by_reason'))}"
    yield "restarts", _counts(summary.get("restarts"))
    if summary.get("pause_seconds") is not None:
        transfer = summary.get("transfer_seconds") or 0
        yield "weight updates", f"{summary['pause_seconds']:.3f} s pause, {transfer:.3f} s transfer (mean)"
    digests = summary.get("weight_digests") or {}
    if digests:
        alike = len(set(digests.values())) == 1
        yield "weight digests", f"{len(digests)} processes {'agree' if alike else 'DIFFER'}"


def _from_to(before: float | None, after: float | None) -> str:
    return " -> ".join("-" if value is None else f"{value:.3f}" for value in (before, after))


def _counts(counts: dict[str, int] | None) -> str:
    nonzero = {name: count for name, count in (counts or {}).items() if count}
    return ", ".join(f"{name} {count}" for name, count in nonzero.items()) or "none"


def print_report(console: Console, summary: dict[str, Any]) -> None:
    console.print(build_table(summary))
    if summary.get("export"):
        console.print(f"checkpoint: {summary['export']}", soft_wrap=True, highlight=False)
        console.print(f"serve it with: vllm serve {summary['export']}", soft_wrap=True, highlight=False)


def draw_curves(rows: list[Row], path: Path) -> bool:
    """Draw reward and accuracy, throughput, and each step's time by phase. Return False without a step."""
    steps, evals = split_rows(rows)
    if not steps:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    xs = [row["step"] for row in steps]
    top.plot(xs, [row.get("reward") for row in steps], marker=".", label="reward (training)")
    evals = [row for row in evals if row.get("accuracy") is not None]
    if evals:
        top.plot([r["step"] for r in evals], [r["accuracy"] for r in evals], "s--", label="accuracy (held out)")
    top.legend(loc="best")
    middle.plot(xs, [row.get("tokens_per_second") for row in steps], marker=".", color="tab:green")
    middle.set_ylabel("sampled tokens/s")
    phases: list[dict[str, float]] = [row.get("phase_seconds") or {} for row in steps]
    names = list(dict.fromkeys(name for phase in phases for name, seconds in phase.items() if seconds))
    if names:
        bottom.stackplot(xs, [[phase.get(name, 0.0) for phase in phases] for name in names], labels=names)
        bottom.legend(loc="best", fontsize="small")
    else:
        bottom.plot(xs, [row.get("step_seconds") for row in steps])
    bottom.set_ylabel("seconds per step")
    bottom.set_xlabel("step")
    for axis in (top, middle, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
