"""When the loop evaluates, saves and ends. Pure.

Invariant: the last step is evaluated and saved, wherever the schedule's steps, which may change at any time, put it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api.manifest.evaluation import HeldOutSet
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.schedule import Schedule


@dataclass
class Cadence:
    """`checkpoint_every`: spec.checkpoint.everySteps."""

    schedule: Schedule
    """As it is now."""
    held_out: Sequence[HeldOutSet]
    checkpoint_every: int

    def update(self, read: RLJobSpec) -> None:
        """Take the fields of `read` that may change while the job runs."""
        self.checkpoint_every, new = read.checkpoint.every_steps, read.schedule
        mutable = {"steps": new.steps, "max_steps_without_signal": new.max_steps_without_signal}
        self.schedule = self.schedule.model_copy(update=mutable)

    def is_over(self, step: int) -> bool:
        """Whether no step follows after `step` finished ones."""
        return step >= self.schedule.steps

    def list_due_sets(self, step: int, evaluated_at: Mapping[str, int]) -> list[str]:
        """Return the names of the sets to evaluate. `evaluated_at`: finished steps at their last evaluations."""
        return [
            each.name
            for each in self.held_out
            if evaluated_at.get(each.name) != step
            and (each.at_start if step == 0 else self._is_due(each.every_steps, step))
        ]

    def checkpoint_is_due(self, step: int) -> bool:
        return step > 0 and self._is_due(self.checkpoint_every, step)

    def _is_due(self, every: int, step: int) -> bool:
        return self.is_over(step) or (every > 0 and step % every == 0)
