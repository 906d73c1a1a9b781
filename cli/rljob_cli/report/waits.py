"""Waits between roles: the seconds of all steps, from the side of each role. Pure.

A step's time is the driver's: `generate` up to the last token, then `score` until the last reward, `update`, `publish`
and `sync`. Invariant: the seconds of each role add up to the time of the steps.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_cli.run.runfolder import Row

_OWNERS = {"generate": "rollouts", "sync": "rollouts", "score": "rewards", "update": "trainer", "publish": "trainer"}
"""Phase -> the role that works in it. In `sync` the rollouts load weights. All others are the driver's."""
ROLES = ("rollouts", "rewards", "trainer", "head")


@dataclass(frozen=True)
class RoleTime:
    role: str
    works_seconds: float
    waits_seconds: dict[str, float] = field(default_factory=dict)
    """By the role that it waits for."""


def build_role_times(steps: Sequence[Row]) -> list[RoleTime]:
    """Return one entry per role; empty without a step."""
    total = sum(float(row.get("step_seconds") or 0.0) for row in steps)
    worked: defaultdict[str, float] = defaultdict(float)
    for row in steps:
        for phase, seconds in (row.get("phase_seconds") or {}).items():
            worked[_OWNERS.get(phase, "head")] += seconds
    if not total:
        return []
    # What no phase covers is the driver's own time.
    worked["head"] += max(0.0, total - sum(worked.values()))
    return [
        RoleTime(role, worked[role], {other: worked[other] for other in ROLES if other != role and worked[other]})
        for role in ROLES
    ]


@dataclass(frozen=True)
class PhaseTime:
    name: str
    seconds: float
    share: float
    """Of the wall time."""
    meaning: str


_MEANINGS = {
    "starting": "the driver waits for the trainer group",
    "evaluate": "held-out prompts: generation and rewards",
    "generate": "rollouts sample; rewards score what has ended",
    "score": "rewards, after the last token: the part that nothing overlaps",
    "update": "log-probs and optimizer steps",
    "publish": "the trainer gathers and writes its weights",
    "sync": "rollouts load the weights",
    "checkpoint": "checkpoints and the export",
}


def build_phase_times(summary: dict[str, Any]) -> list[PhaseTime]:
    """Return the phases of the whole run, longest first, and the time outside of the driver last."""
    wall = float(summary.get("wall_seconds") or 0.0)
    phases = {name: float(seconds) for name, seconds in (summary.get("phase_seconds") or {}).items() if seconds}
    whole = max(wall, sum(phases.values())) or 1.0
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    found = [PhaseTime(name, seconds, seconds / whole, _MEANINGS.get(name, "")) for name, seconds in ordered]
    outside = wall - sum(phases.values())
    if wall and outside > 0:
        meaning = "start and stop of Pods, steps that were repeated, and time that no phase covers"
        found.append(PhaseTime("other", outside, outside / whole, meaning))
    return found
