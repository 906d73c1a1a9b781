"""Which steps a replay trains on, and from which weights. Pure.

A step is that of the run only if it starts from the run's weights. So a replay begins at a checkpoint of the run, or at
the initial model, and trains on all steps from there. Invariant: the steps ascend, and each is in the log.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from rljob_api.errors import UserError

_RANGE = re.compile(r"(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class StepRange:
    first: int
    last: int


@dataclass(frozen=True)
class ReplayPlan:
    checkpoint: int | None
    """Step of the checkpoint from which to start. None: the initial model."""
    steps: tuple[int, ...]
    missing: tuple[int, ...] = ()
    """Steps between the start and the first one that are not in the log: the weights are not those of the run."""

    def describe(self, requested: StepRange | None) -> str:
        """Return what happens, in one line."""
        start = "the initial model" if self.checkpoint is None else f"the checkpoint of step {self.checkpoint}"
        line = f"replays {_format(self.steps)} from {start}"
        if self.missing:
            return (
                f"{line}; {_format(self.missing)} between them: not in the log, so the weights differ from the run's, "
                "and so do all numbers"
            )
        if requested is not None and (before := [step for step in self.steps if step < requested.first]):
            return f"{line}; {_format(before)} for the weights of step {requested.first}: no checkpoint has them"
        return line


def parse_steps(text: str) -> StepRange:
    """Parse A:B, both included, or one step. Raise UserError."""
    match = _RANGE.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise UserError(f"--steps must be A:B with 1 <= A <= B, or one step, as in 40:45, got {text}")
    return StepRange(int(match[1]), int(match[2] or match[1]))


def plan_replay(recorded: Collection[int], checkpoints: Collection[int], requested: StepRange | None) -> ReplayPlan:
    """`recorded`: steps whose training is in the log, at least one. `checkpoints`: steps of complete checkpoints.
    `requested`: None: all that the log and the checkpoints allow. Raise UserError if that is nothing."""
    if requested is None:
        return _plan_all(recorded, checkpoints)
    wanted = range(requested.first, requested.last + 1)
    if absent := [step for step in wanted if step not in recorded]:
        raise UserError(
            f"--steps {requested.first}:{requested.last}: {_format(absent)} not in the log, which has "
            f"{_format(sorted(recorded))}"
        )
    start = max((step for step in checkpoints if step < requested.first), default=0)
    before = range(start + 1, requested.first)
    missing = tuple(step for step in before if step not in recorded)
    return ReplayPlan(start or None, tuple(wanted) if missing else (*before, *wanted), missing)


def _plan_all(recorded: Collection[int], checkpoints: Collection[int]) -> ReplayPlan:
    last, first = max(recorded), max(recorded)
    while first - 1 in recorded:
        first -= 1
    starts = [step for step in (0, *checkpoints) if first - 1 <= step < last]
    if not starts:
        raise UserError(
            f"the log has {_format(range(first, last + 1))}, and no checkpoint is older than its last step: "
            f"spec.tracking.trajectoriesSize has deleted older files; --steps {first}:{last} trains the initial model, "
            "whose weights are not those of the run"
        )
    start = min(starts)
    return ReplayPlan(start or None, tuple(range(start + 1, last + 1)))


def _format(steps: Collection[int]) -> str:
    """`step 4`, `steps 4 to 7`, `steps 1 to 7 with gaps`."""
    first, last = min(steps), max(steps)
    if first == last:
        return f"step {first}"
    return f"steps {first} to {last}" + ("" if len(steps) == last - first + 1 else " with gaps")
