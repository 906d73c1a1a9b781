"""The summary of a run, summary.json: from the driver's summary, the metrics and the backend's restarts. Pure.

Invariant: the driver's fields are passed through unchanged.
"""

from __future__ import annotations

from typing import Any

from rljob_cli.run.metrics_file import Row, split_rows


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
    summary["restarts"] = {
        role: restarts.get(role, 0) + by_driver.get(role, 0) for role in sorted({*restarts, *by_driver})
    }
    summary["steps"] = steps[-1]["step"] if steps else 0
    return summary
