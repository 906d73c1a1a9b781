"""The turns of trainer and rollouts on shared devices: what each holds and how long a change takes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rljob_api.quantity import show_bytes
from rljob_api.run.metrics import StepRecord


@dataclass(frozen=True)
class SideOfTurns:
    role: str
    working: str
    """Memory in its own turn: the most in a step. `-`: unknown."""
    waiting: str
    """Memory in the turn of the other one."""
    leave_seconds: float | None
    """Mean time to free the devices. None: unknown."""
    return_seconds: float | None
    """Mean time until it can work again."""


_SIDES = (
    ("rollouts", "rollouts_awake", "rollouts_asleep", "sleep", "wake"),
    ("models", "models_awake", "models_asleep", "sleep", "wake"),
    ("trainer", "trainer_update", "trainer_freed", "free", "restore"),
)
"""Role, with the keys of TurnNumbers.device_bytes and of its turn_seconds."""


def build_sides(steps: Sequence[StepRecord]) -> list[SideOfTurns]:
    """Return both sides; empty if nothing is shared."""
    if not any(step.device_bytes for step in steps):
        return []
    return [
        SideOfTurns(role, _largest(steps, working), _largest(steps, waiting), _mean(steps, leave), _mean(steps, back))
        for role, working, waiting, leave, back in _SIDES
        if role != "models" or any(working in step.device_bytes for step in steps)
    ]


def _largest(steps: Sequence[StepRecord], state: str) -> str:
    found = [step.device_bytes[state] for step in steps if state in step.device_bytes]
    return show_bytes(max(found)) if found else "-"


def _mean(steps: Sequence[StepRecord], part: str) -> float | None:
    found = [step.turn_seconds[part] for step in steps if part in step.turn_seconds]
    return fmean(found) if found else None
