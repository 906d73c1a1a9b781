"""The training loop: what a step does.

    data cursor --> groups, as the schedule admits them --> episodes --(tokens)--> rollouts     (train_lane, collection)
                                    |  as soon as one ends
                                    +--> rewards: valid score | invalid with a reason           (rewards)
    groups scored --> advantages --> rows --> trainer.accumulate ... trainer.apply              (updates, algorithms)
    trainer.save --> the ranks write their copies --> COMPLETE, next to the following steps     (checkpointer)
    trainer.publish --> board.announce --> rollouts pull --> rollouts.sync --> next step        (publisher, replicas)
    held-out prompts --> episodes --> rewards, next to all of this                              (evaluation)

Invariant: a step counts once its weights are served. If anything dies before that, the step is repeated from its start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rljob_api.tracing.spans import span
from rljob_trainer import traces
from rljob_trainer.driver.cadence import Cadence
from rljob_trainer.driver.checkpointer import Checkpointer
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.evaluation import EvalLane
from rljob_trainer.driver.exporter import Exporter
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.ports import Trainer, Turns
from rljob_trainer.driver.publisher import Publisher
from rljob_trainer.driver.train_lane import TrainLane
from rljob_trainer.driver.updates import StepOutcome, StepUpdates
from rljob_trainer.driver.watcher import run_with_watcher
from rljob_trainer.services.demand import Forecaster


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class TrainLoop:
    """The steps of one trainer group."""

    cadence: Cadence
    follow_schedule: Callable[[], Awaitable[None]]
    """Lets the cadence and the trainer follow changes of the schedule."""
    trainer: Trainer
    turns: Turns
    lane: TrainLane
    held_out: EvalLane
    updates: StepUpdates
    publisher: Publisher
    ledger: Ledger
    checkpoints: Checkpointer
    exporter: Exporter
    collector: Collector
    forecaster: Forecaster
    judge: Callable[[StepOutcome], None]
    """Gets each recorded step. Raises if the job must end."""
    decides_best: str = ""
    """Name of the evaluation set by which the best step is kept. Empty: none is."""
    settled: asyncio.Event = field(default_factory=_set_event)
    """Whether the trainer's state is that of the history, and no save reads it. Not so from a step's first update until
    it counts."""

    async def run(self) -> None:
        """Train up to the last step of the schedule, and evaluate and save it."""
        await self.publisher.publish(self.ledger.history.step)
        with self.ledger.phase("checkpoint"):
            await self.exporter.restore(self.ledger.history.step)
        while await self._prepare():
            with traces.begin_step(self.ledger.history.step + 1):
                await self._step()
            await self._record_evaluation(wait=False)

    async def _step(self) -> None:
        ledger, lane = self.ledger, self.lane
        ledger.begin_step()
        self.forecaster.record_begin(time.monotonic(), self.collector.loads())
        with ledger.phase("score"):  # the time in which neither generation nor the trainer works
            lane.begin_step(self.cadence.schedule.steps)
            # No group of the step ends without rollouts that serve its weights.
            outcome = await run_with_watcher(self._update(), self.publisher.wait())
        lane.finish_step()
        pipeline = ledger.pipeline_seconds() if lane.schedule.max_staleness else None
        self.forecaster.record_end(lane.progress, outcome.update_seconds, pipeline, self.collector.loads())

        with span("publish"):
            await self.publisher.publish(ledger.history.step + 1)
        await ledger.trajectories.flush()  # of the previous step: never hold two in memory
        await ledger.record_step(outcome, lane.snapshot(), lane.progress)
        self.settled.set()
        self.judge(outcome)

    async def _update(self) -> StepOutcome:
        """Run the updates of a step, each as its groups are scored; on shared devices, once all are."""
        outcome = StepOutcome()
        await self.turns.give_to_trainer()
        for batch in self.updates.mini_batches(self.ledger.history.step):
            with traces.MiniBatchSpans(self.ledger.history.step + 1, batch.number) as traced:
                async for rows in self.updates.rows(batch, self.lane):
                    traced.begin(batch.groups)
                    with self.ledger.training(), span("accumulate", {"rljob.rows": len(rows)}):
                        await self.trainer.accumulate(rows, batch.versions)
                self.settled.clear()
                with self.ledger.training(), span("apply", links=traced.episodes):
                    outcome.add(batch, await self.trainer.apply(batch.denominator))
        outcome.num_replaced, outcome.num_skipped = self.lane.num_replaced, self.lane.num_skipped
        return outcome

    async def _prepare(self) -> bool:
        """Between two steps: follow the schedule, evaluate and save what is due. Return whether a step follows."""
        history = self.ledger.history
        self.checkpoints.check()
        await self.follow_schedule()
        if self.cadence.is_over(history.step):
            await self._record_evaluation(wait=True)  # else the last step would not be evaluated
        due = self.cadence.list_due_sets(history.step, history.evaluated_at)
        if due and self.held_out.step is None:
            self.held_out.start(history.step, due)
        decides = self.held_out.step == history.step > 0 and self.decides_best in self.held_out.names
        if self.cadence.is_over(history.step):
            await self._record_evaluation(wait=True)
            await self.follow_schedule()  # meanwhile it may have got more steps
        # The weights of a step that may be the best are gone when its figures are known.
        is_due = self.checkpoints.is_owed or decides or self.cadence.checkpoint_is_due(history.step)
        if is_due and not self.checkpoints.exists(history.step):
            await self.save()
        return not self.cadence.is_over(history.step)

    async def _record_evaluation(self, *, wait: bool) -> None:
        """Record an evaluation that has ended; with `wait`, wait for its end."""
        with self.ledger.phase("evaluate"):
            result = await self.held_out.finish(wait=wait)
        if result is not None:
            await self.ledger.record_evaluation(result)

    async def save(self, *, exports: bool = True) -> None:
        """Begin a checkpoint. Training waits as long as this takes. `exports`: as in Checkpointer.save."""
        self.settled.clear()
        try:
            with self.ledger.phase("checkpoint"):
                await self.ledger.trajectories.flush()
                await self.checkpoints.save(self.ledger.history, exports=exports)
        finally:
            self.settled.set()
        await self.ledger.write_summary()
