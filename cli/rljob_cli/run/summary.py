"""The summary of a run, as an object and as a table. Pure.

Invariant: metrics.jsonl holds the run's one history, so its rows decide on steps and evaluations; the driver's summary,
which is as old as the last checkpoint, adds what the rows lack.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from rljob_cli.run.runfolder import Row, split_rows
from rljob_cli.run.sessions import Session, total_restarts, total_seconds


def build_summary(
    *,
    name: str,
    phase: str,
    total_steps: int,
    driver: Row,
    rows: list[Row],
    sessions: Sequence[Session],
    checkpoint: int | None,
) -> dict[str, Any]:
    """Build summary.json. `driver` is driver-summary.json, empty if the driver wrote none."""
    steps, evals = split_rows(rows)
    counted = {"weight_digests": {}, "prompts_trained": [], **_count_rows(steps, evals)}
    # Rows that are newer than the last checkpoint are not in the driver's summary.
    has_all = len(driver.get("step_rewards") or []) >= len(steps)
    summary = {
        "name": name,
        "phase": phase,
        "steps": steps[-1]["step"] if steps else 0,
        "total_steps": total_steps,
        "checkpoint_step": checkpoint,
        "wall_seconds": round(total_seconds(sessions), 3) if sessions else None,
        **(counted | driver if has_all else driver | counted),
        "evaluations": [{key: row.get(key) for key in ("step", "accuracy", "means")} for row in evals],
    }
    before = next((row for row in evals if row["step"] == 0), {})
    after = evals[-1] if evals and evals[-1]["step"] > 0 else {}
    if evals or "accuracy_before" not in driver:
        summary |= {"accuracy_before": before.get("accuracy"), "accuracy_after": after.get("accuracy")}
    summary["metrics_before"] = (before.get("means") if evals else driver.get("eval_before")) or {}
    summary["metrics_after"] = (after.get("means") if evals else driver.get("eval_after")) or {}
    restarts, by_driver = total_restarts(sessions), driver.get("restarts") or {}
    roles = sorted({*restarts, *by_driver})
    summary["restarts"] = {role: restarts.get(role, 0) + by_driver.get(role, 0) for role in roles}
    summary["sessions"] = [asdict(session) for session in sessions]
    return summary


def _count_rows(steps: list[Row], evals: list[Row]) -> dict[str, Any]:
    """Return what the driver's summary counts, from its lines in metrics.jsonl."""
    rows = [*steps, *evals]
    phases: Counter[str] = Counter()
    invalid: Counter[str] = Counter()
    for row in rows:
        phases.update(row.get("phase_seconds") or {"evaluate": row.get("seconds") or 0.0})
        invalid.update(row.get("invalid_by_reason") or {})
    num_rewards = max((len(row.get("rewards") or {}) for row in steps), default=1)
    return {
        "step_rewards": [row.get("reward") for row in steps],
        "phase_seconds": {name: seconds for name, seconds in phases.items() if seconds},
        "samples_trained": sum(row.get("num_samples", 0) - row.get("num_masked", 0) for row in steps) if rows else None,
        "rewards_served": sum(row.get("num_samples", 0) * num_rewards for row in rows) if rows else None,
        "invalid_by_reason": dict(invalid),
    }


def build_table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"{summary['name']}: {summary['phase']}", show_header=False, title_justify="left")
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in summary_lines(summary):
        table.add_row(name, value)
    return table


def summary_lines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values, the most important first."""
    evals = summary.get("evaluations") or []
    ended = _describe_end(summary, evals)
    if any(row["accuracy"] is not None for row in evals):
        yield "held-out accuracy", _from_to([(row["step"], row["accuracy"]) for row in evals], ended)
    for component in sorted({name for row in evals for name in row["means"] or {}}):
        yield f"  {component}", _from_to([(row["step"], (row["means"] or {}).get(component)) for row in evals], "")
    rewards = [reward for reward in summary.get("step_rewards") or [] if reward is not None]
    if len(rewards) > 1:
        yield "reward", f"{rewards[0]:.3f} -> {rewards[-1]:.3f} over {len(rewards)} steps"
    elif rewards:
        yield "reward", f"{rewards[0]:.3f} (1 step)"
    yield "steps", _describe_progress(summary)
    sessions = summary.get("sessions") or []
    phases = {name: s for name, s in (summary.get("phase_seconds") or {}).items() if s}
    parts = [f"{name} {seconds:.1f} s" for name, seconds in sorted(phases.items(), key=lambda item: -item[1])]
    in_sessions = f" in {len(sessions)} sessions" if len(sessions) > 1 else ""
    wall = "not recorded" if summary["wall_seconds"] is None else f"{summary['wall_seconds']:.1f} s{in_sessions}"
    yield "wall time", wall + (f": {', '.join(parts)}" if parts else "")
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


def _describe_end(summary: dict[str, Any], evals: list[Row]) -> str:
    """Return why the last evaluation is missing; empty if it exists."""
    is_last = bool(evals) and evals[-1]["step"] >= summary.get("total_steps", 0)
    verbs = {"Interrupted": "interrupted", "Failed": "failed"}
    return "" if is_last or summary["phase"] not in verbs else f"{verbs[summary['phase']]} before the last"


def _describe_progress(summary: dict[str, Any]) -> str:
    done, total, checkpoint = summary["steps"], summary["total_steps"], summary.get("checkpoint_step")
    if summary["phase"] == "Succeeded":
        return str(done)
    again = f"resumes after step {checkpoint}" if checkpoint else "starts over, since there is no checkpoint"
    return f"{done} of {total}; the same `rljob run` {again}"


def _from_to(points: Sequence[tuple[int, float | None]], note: str) -> str:
    """Describe evaluations, given as (step, value). With one there is no change, and it must not look like one."""

    def show(value: float | None) -> str:
        return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"

    if len(points) == 1:
        return f"{show(points[0][1])} ({'; '.join(filter(None, [f'step {points[0][0]}', note]))})"
    first, last = points[0], points[-1]
    return f"{show(first[1])} -> {show(last[1])}" + (f" (steps {first[0]} and {last[0]}; {note})" if note else "")


def _counts(counts: dict[str, int] | None) -> str:
    nonzero = {name: count for name, count in (counts or {}).items() if count}
    return ", ".join(f"{name} {count}" for name, count in nonzero.items()) or "none"


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    console.print(build_table(summary))
    if summary.get("export"):
        console.print(f"checkpoint: {summary['export']}", soft_wrap=True, highlight=False)
        console.print(f"serve it with: vllm serve {summary['export']}", soft_wrap=True, highlight=False)
