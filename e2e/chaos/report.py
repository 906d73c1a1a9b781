"""What runs under faults showed, as tables and as JSON: `python -m chaos.report FILE...` for several runs. Pure but for
the reading of files."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """One fault. Seconds since it was injected; None: not seen."""

    fault: str
    at_step: int
    detected_seconds: float | None
    """Until the job's status, its Pods, its events or its processes showed something."""
    found: str
    """What that was."""
    recovered_seconds: float | None
    """Until a new step ended, and all that had to be replaced was."""
    num_lost_steps: int
    """Steps that were trained again."""
    alarm: str = ""
    """What was replaced or called hung, although the fault is waited out."""

    @property
    def is_good(self) -> bool:
        return self.recovered_seconds is not None and not self.alarm


@dataclass(frozen=True)
class Report:
    seed: int
    outcomes: list[Outcome]
    training_share: float | None
    """The share of the wall time that trained, as the driver counts it."""

    def failures(self) -> list[str]:
        return [_describe_failure(outcome) for outcome in self.outcomes if not outcome.is_good]

    def to_json(self) -> str:
        summary = {"seed": self.seed, "training_share": self.training_share, **summarize(self.outcomes)}
        return json.dumps(summary | {"faults": [asdict(outcome) for outcome in self.outcomes]})

    def to_table(self) -> str:
        lines = [f"{'fault':28} {'step':>5} {'detected':>9} {'recovered':>9} {'lost':>4}  found by"]
        for outcome in self.outcomes:
            detected, recovered = _seconds(outcome.detected_seconds), _seconds(outcome.recovered_seconds)
            alarm = f"; FALSE ALARM: {outcome.alarm}" if outcome.alarm else ""
            lines.append(
                f"{outcome.fault:28} {outcome.at_step:5} {detected:>9} {recovered:>9} {outcome.num_lost_steps:4}"
                f"  {outcome.found}{alarm}"
            )
        return "\n".join(lines)


def read_report(text: str) -> Report:
    """Return the report of `Report.to_json`."""
    found: dict[str, Any] = json.loads(text)
    return Report(found["seed"], [Outcome(**each) for each in found["faults"]], found["training_share"])


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "num_faults": len(outcomes),
        "num_not_recovered": sum(outcome.recovered_seconds is None for outcome in outcomes),
        "num_false_alarms": sum(bool(outcome.alarm) for outcome in outcomes),
        "num_lost_steps": sum(outcome.num_lost_steps for outcome in outcomes),
        "median_detected_seconds": _median(outcome.detected_seconds for outcome in outcomes),
        "median_recovered_seconds": _median(outcome.recovered_seconds for outcome in outcomes),
    }


def summarize_runs(reports: Sequence[Report]) -> str:
    """Return a table of several runs: a line for each kind of fault, then a line for all."""
    by_fault: dict[str, list[Outcome]] = defaultdict(list)
    for report in reports:
        for outcome in report.outcomes:
            by_fault[outcome.fault].append(outcome)
    every = [outcome for report in reports for outcome in report.outcomes]
    lines = [f"{'fault':28} {'count':>5} {'detected':>9} {'recovered':>9} {'longest':>9} {'lost':>4} {'failed':>6}"]
    lines += [_line_of(fault, outcomes) for fault, outcomes in sorted(by_fault.items())]
    seeds = ", ".join(str(report.seed) for report in reports)
    return "\n".join([*lines, _line_of("all", every), f"{len(reports)} runs, seeds {seeds}; seconds are medians"])


def _line_of(fault: str, outcomes: Sequence[Outcome]) -> str:
    found = summarize(outcomes)
    times = [_seconds(found[f"median_{each}_seconds"]) for each in ("detected", "recovered")]
    longest = max((each.recovered_seconds for each in outcomes if each.recovered_seconds is not None), default=None)
    failed = sum(not outcome.is_good for outcome in outcomes)
    return (
        f"{fault:28} {len(outcomes):5} {times[0]:>9} {times[1]:>9} {_seconds(longest):>9} {found['num_lost_steps']:4} "
        f"{failed:6}"
    )


def _describe_failure(outcome: Outcome) -> str:
    return f"{outcome.fault}: false alarm: {outcome.alarm}" if outcome.alarm else outcome.fault


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 1) if known else None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


if __name__ == "__main__":
    print(summarize_runs([read_report(Path(name).read_text()) for name in sys.argv[1:]]))
