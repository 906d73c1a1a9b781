"""The faults, and the plan that a seed draws from them. Pure.

Invariant: the same seed and number give the same plan. Each kind comes once before any comes again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

Action = Literal["kill", "freeze", "slow", "cut", "drain", "power-off", "fill-disk", "flip-bit", "freeze-api-server"]


@dataclass(frozen=True)
class Fault:
    action: Action
    target: str
    """kill, freeze, slow: a key of PROCESSES. cut: two pools, `trainer-rollout`. drain, power-off: a pool."""
    seconds: float = 0.0
    """For how long, if the fault ends by itself."""
    is_replaced: bool = False
    """Whether a Pod, a container or the trainer group must be replaced before the fault is over."""
    is_waited_out: bool = False
    """Whether nothing may be replaced or be called hung: work that takes long, and an outage."""

    @property
    def name(self) -> str:
        """As in reports. A long cut is not a short one."""
        minutes = f" {self.seconds / 60:.0f} min" if self.action == "cut" and self.seconds >= 60 else ""
        return f"{self.action} {self.target}{minutes}".strip()


@dataclass(frozen=True)
class ProcessOf:
    role: str
    """Role of the Pod: head, trainer, rollout, reward; or operator."""
    command: str
    """Part of the command line or of the name of the process."""


PROCESSES = {
    "reward worker": ProcessOf("reward", "rljob_service.worker"),
    "reward server": ProcessOf("reward", "-m rljob_service "),
    "rank": ProcessOf("trainer", "ray::RankProcess"),
    "raylet": ProcessOf("trainer", "raylet/raylet"),
    "engine": ProcessOf("rollout", "VLLM::EngineCor"),
    "rollout": ProcessOf("rollout", "-m rljob_trainer.rollout"),
    "head": ProcessOf("head", "-m rljob_trainer.head"),
    "gcs": ProcessOf("head", "gcs_server"),
    "operator": ProcessOf("operator", "rljob_operator"),
}
_IN_PLACE = ("reward worker", "operator")
"""What its own Pod or its standby replaces, without a trace in the job's status: its process says so."""
SLOW_SECONDS = 20
"""Less than the lowest limit of the job. A step takes 2 to 3 s, and each phase of it and each reward less than 1 s."""
_CAN_BE_SLOW = ("rank", "engine", "rollout", "head", "reward server")

QUICK = (
    *(Fault("kill", name, is_replaced=name not in _IN_PLACE) for name in PROCESSES),
    *(Fault("freeze", name, is_replaced=name not in _IN_PLACE) for name in PROCESSES if name not in ("raylet", "gcs")),
    *(Fault("slow", name, seconds=SLOW_SECONDS, is_waited_out=True) for name in _CAN_BE_SLOW),
    Fault("cut", "trainer-reward", seconds=45, is_waited_out=True),
    Fault("cut", "trainer-rollout", seconds=45),
    Fault("fill-disk", "", seconds=30, is_waited_out=True),
    Fault("flip-bit", "", is_replaced=True),
)
"""Over in two minutes each."""
LONG = (
    Fault("freeze-api-server", "", seconds=60),
    Fault("cut", "trainer-reward", seconds=600, is_waited_out=True),
    Fault("drain", "trainer", is_replaced=True),
    Fault("power-off", "rollout", seconds=60, is_replaced=True),
    Fault("power-off", "reward", seconds=60, is_replaced=True),
)
IN_CI = ("kill rank", "freeze rank", "freeze engine", "slow rank", "cut trainer-reward", "flip-bit")


@dataclass(frozen=True)
class Injection:
    fault: Fault
    delay: float
    """Seconds after a step, so that it comes anywhere in the next one."""


def choose_faults(names: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of these names, or all. Raises ValueError for a name that no fault has."""
    known = {fault.name: fault for fault in (*QUICK, *LONG)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no fault is named {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(known[name] for name in names or known)


def draw_plan(seed: int, number: int, faults: tuple[Fault, ...] = (*QUICK, *LONG)) -> list[Injection]:
    """Return `number` injections: all faults in a drawn order, then again in another one."""
    drawn = random.Random(seed)
    orders = (drawn.sample(faults, len(faults)) for _ in cycle((0,)))
    return [Injection(fault, drawn.uniform(0, 3)) for fault in islice((f for order in orders for f in order), number)]
