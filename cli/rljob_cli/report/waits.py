"""Waits between roles: the seconds of all steps, from the side of each role. Pure.

A step's time is the driver's: `generate` up to the last token, then `score` until the last reward, `update`, `publish`
and `sync`; on shared devices also `sleep` and `wake`. Invariant: the seconds of each role add up to the time of the
steps.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rljob_api.run.metrics import StepRecord
from rljob_api.run.summaries import RunSummary
from rljob_cli.run.summary import sort_phases

_OWNERS = {
    **dict.fromkeys(("generate", "sync", "wake"), "rollouts"),
    **dict.fromkeys(("update", "publish", "sleep"), "trainer"),
    "score": "rewards",
}
"""Phase -> the role that works in it, or that gets its turn. In `sync` the rollouts load weights. All others are the
driver's."""
ROLES = ("rollouts", "rewards", "trainer", "head")


@dataclass(frozen=True)
class RoleTime:
    role: str
    works_seconds: float
    waits_seconds: dict[str, float] = field(default_factory=dict)
    """By the role that it waits for."""


def build_role_times(steps: Sequence[StepRecord]) -> list[RoleTime]:
    """Return one entry per role; empty without a step."""
    total = sum(step.step_seconds or 0.0 for step in steps)
    worked: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for phase, seconds in step.phase_seconds.items():
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
    """Share of the wall time."""
    meaning: str


_MEANINGS = {
    "starting": "the driver waits for the trainer group",
    "evaluate": "held-out prompts: generation and rewards",
    "generate": "rollouts sample; rewards score what has ended",
    "score": "rewards, after the last token: the part that nothing overlaps",
    "update": "log-probs and optimizer steps",
    "publish": "the trainer gathers and writes its weights",
    "sync": "rollouts load the weights",
    "sleep": "rollouts free the shared devices, and the trainer's state returns to them",
    "wake": "the trainer's state leaves the shared devices, and rollouts get their memory back",
    "checkpoint": "checkpoints and the export",
}


_CAUSES = {
    "start": "from the start of the driver to its first step",
    "checkpoint": "training waited for a checkpoint or the export",
    "evaluation": "training waited for held-out prompts",
    "restart": "steps that were repeated, and from the death of a driver to the next one",
    "hung": "a rank of the trainer, or the driver, finished nothing until it was replaced",
    "outage": "something that the job depends on did not answer, and training waited",
    "queue": "after an orderly end of the driver, such as a suspension; not in the share",
}


def build_lost_times(summary: RunSummary) -> list[PhaseTime]:
    """Return the time that did not train by cause, the longest first, with its share of the time without the queue."""
    share, lost = summary.training_share, {name: s for name, s in summary.lost_seconds.items() if s}
    active = sum(lost.values()) - lost.get("queue", 0.0)
    whole = active / (1 - share) if share is not None and share < 1 else 0.0
    ordered = sorted(lost.items(), key=lambda item: -item[1])
    return [
        PhaseTime(name, seconds, seconds / whole if whole and name != "queue" else 0.0, _CAUSES.get(name, ""))
        for name, seconds in ordered
    ]


def build_phase_times(summary: RunSummary) -> list[PhaseTime]:
    """Return the phases of the whole run, longest first, and the time outside of the driver last."""
    wall = summary.wall_seconds or 0.0
    ordered = sort_phases(summary)
    covered = sum(seconds for _, seconds in ordered)
    whole = max(wall, covered) or 1.0
    found = [PhaseTime(name, seconds, seconds / whole, _MEANINGS.get(name, "")) for name, seconds in ordered]
    outside = wall - covered
    if wall and outside > 0:
        meaning = "start and stop of Pods, steps that were repeated, and time that no phase covers"
        found.append(PhaseTime("other", outside, outside / whole, meaning))
    return found
