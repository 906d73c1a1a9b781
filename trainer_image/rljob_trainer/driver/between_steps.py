"""What is due between two steps: changes of the schedule, evaluations and checkpoints.

`Cadence` says when, and is pure. Invariants: only a state of the history is saved; an evaluation that has ended is
recorded before the next one starts; the last step is evaluated and saved, wherever the schedule's steps, which may
change at any time, put it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.manifest.evaluation import HeldOutSet
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.schedule import Schedule
from rljob_trainer.driver.checkpointer import Checkpointer
from rljob_trainer.driver.evaluation import EvalLane
from rljob_trainer.driver.ledger import Ledger


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


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class BetweenSteps:
    cadence: Cadence
    follow_spec: Callable[[], Awaitable[None]]
    """Lets the run follow changes of the spec's fields that may change."""
    held_out: EvalLane
    checkpoints: Checkpointer
    ledger: Ledger
    decides_best: str = ""
    """Name of the evaluation set by which the best step is kept. Empty: none is."""
    settled: asyncio.Event = field(default_factory=_set_event)
    """Whether the trainer's state is that of the history, and no save reads it. Not so from a step's first update until
    it counts."""

    async def prepare(self) -> bool:
        """Follow the spec, evaluate and save what is due. Return whether a step follows."""
        history = self.ledger.history
        self.checkpoints.check()
        await self.follow_spec()
        if self.cadence.is_over(history.step):
            await self.record_evaluation(wait=True)  # else the last step would not be evaluated
        due = self.cadence.list_due_sets(history.step, history.evaluated_at)
        if due and self.held_out.step is None:
            self.held_out.start(history.step, due)
        decides = self.held_out.step == history.step > 0 and self.decides_best in self.held_out.names
        if self.cadence.is_over(history.step):
            await self.record_evaluation(wait=True)
            await self.follow_spec()  # meanwhile it may have got more steps
        # The weights of a step that may be the best are gone when its figures are known.
        is_due = self.checkpoints.is_owed or decides or self.cadence.checkpoint_is_due(history.step)
        if is_due and not self.checkpoints.exists(history.step):
            await self.save()
        return not self.cadence.is_over(history.step)

    async def record_evaluation(self, *, wait: bool) -> None:
        """Record an evaluation that has ended; with `wait`, wait for its end."""
        with self.ledger.clock.phase("evaluate"):
            result = await self.held_out.finish(wait=wait)
        if result is not None:
            await self.ledger.record_evaluation(result)

    async def save(self, *, exports: bool = True) -> None:
        """Begin a checkpoint. Training waits as long as this takes. `exports`: as in Checkpointer.save."""
        self.settled.clear()
        try:
            with self.ledger.clock.phase("checkpoint"):
                await self.ledger.trajectories.flush()
                await self.checkpoints.save(self.ledger.history, exports=exports)
        finally:
            self.settled.set()
        await self.ledger.write_summary()
