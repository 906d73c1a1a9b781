"""What a run under faults showed, as a table and as one JSON object. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True)
class Outcome:
    """One fault. Seconds since it was injected; None: not seen."""

    fault: str
    at_step: int
    detected_seconds: float | None
    """Until the job's status, its Pods or its events showed something."""
    found: str
    """What that was."""
    recovered_seconds: float | None
    """Until a new step ended, and all that had to be replaced was."""
    num_lost_steps: int
    """Steps that were trained again."""


@dataclass(frozen=True)
class Report:
    seed: int
    outcomes: list[Outcome]
    training_share: float | None
    """The share of the wall time that trained, as the driver counts it."""

    def failures(self) -> list[str]:
        return [outcome.fault for outcome in self.outcomes if outcome.recovered_seconds is None]

    def to_json(self) -> str:
        times = [outcome.recovered_seconds for outcome in self.outcomes if outcome.recovered_seconds is not None]
        found = [outcome.detected_seconds for outcome in self.outcomes if outcome.detected_seconds is not None]
        summary = {
            "seed": self.seed,
            "num_faults": len(self.outcomes),
            "num_not_recovered": len(self.failures()),
            "median_detected_seconds": round(median(found), 1) if found else None,
            "median_recovered_seconds": round(median(times), 1) if times else None,
            "training_share": self.training_share,
            "faults": [asdict(outcome) for outcome in self.outcomes],
        }
        return json.dumps(summary)

    def to_table(self) -> str:
        lines = [f"{'fault':28} {'step':>5} {'detected':>9} {'recovered':>9} {'lost':>4}  found by"]
        for outcome in self.outcomes:
            detected, recovered = _seconds(outcome.detected_seconds), _seconds(outcome.recovered_seconds)
            lines.append(
                f"{outcome.fault:28} {outcome.at_step:5} {detected:>9} {recovered:>9} {outcome.num_lost_steps:4}"
                f"  {outcome.found}"
            )
        return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
