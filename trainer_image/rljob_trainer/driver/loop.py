"""The training loop: what a step does.

    data cursor --> groups, as the schedule admits them --> episodes --(tokens)--> rollouts     (train_lane, collection)
                                    |  as soon as one ends
                                    +--> rewards: valid score | invalid with a reason           (rewards)
    groups scored --> advantages --> rows --> trainer.accumulate ... trainer.apply              (updates, algorithms)
    trainer.publish --> board.announce --> rollouts pull --> rollouts.sync --> next step        (publisher, replicas)
    between two steps, what is due, next to the following ones:                                 (between_steps)
        held-out prompts --> episodes --> rewards                                               (evaluation)
        trainer.save --> the ranks write their copies --> COMPLETE                              (checkpointer)

Invariant: a step counts once its weights are served. If anything dies before that, the step is repeated from its start.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rljob_api.tracing.spans import span
from rljob_trainer import traces
from rljob_trainer.concurrency import run_with_watcher
from rljob_trainer.driver.between_steps import BetweenSteps
from rljob_trainer.driver.checkpointer import Exporter
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.model_check import ModelCheck
from rljob_trainer.driver.ports import Trainer, Turns
from rljob_trainer.driver.publisher import Publisher
from rljob_trainer.driver.train_lane import TrainLane
from rljob_trainer.driver.updates import StepOutcome, StepUpdates
from rljob_trainer.services.demand import Forecaster


@dataclass
class TrainLoop:
    """The steps of one trainer group."""

    between: BetweenSteps
    trainer: Trainer
    turns: Turns
    lane: TrainLane
    updates: StepUpdates
    publisher: Publisher
    ledger: Ledger
    exporter: Exporter
    collector: Collector
    forecaster: Forecaster
    judge: Callable[[StepOutcome], None]
    """Gets each recorded step. Raises if the job must end."""
    check: ModelCheck | None = None

    async def run(self) -> None:
        """Train up to the last step of the schedule, and evaluate and save it."""
        scores = None if self.check is None else await self.check.score(self.trainer)
        await self.publisher.publish(self.ledger.history.step)
        if self.check is not None and scores is not None:
            with self.ledger.clock.phase("sync"):
                await self.publisher.wait()
                await self.check.compare(scores, self.collector.rollouts)
        with self.ledger.clock.phase("checkpoint"):
            await self.exporter.restore(self.ledger.history.step)
        while await self.between.prepare():
            with traces.begin_step(self.ledger.history.step + 1):
                await self._step()
            await self.between.record_evaluation(wait=False)

    async def _step(self) -> None:
        ledger, lane = self.ledger, self.lane
        ledger.begin_step()
        self.forecaster.record_begin(time.monotonic(), self.collector.loads())
        with ledger.clock.phase("score"):  # the time in which neither generation nor the trainer works
            lane.begin_step(self.between.cadence.schedule.steps)
            # No group of the step ends without rollouts that serve its weights.
            outcome = await run_with_watcher(self._update(), self.publisher.wait())
        lane.finish_step()
        pipeline = ledger.clock.pipeline_seconds() if lane.schedule.max_staleness else None
        self.forecaster.record_end(lane.progress, outcome.update_seconds, pipeline, self.collector.loads())

        with span("publish"):
            await self.publisher.publish(ledger.history.step + 1)
        await ledger.trajectories.flush()  # of the previous step: never hold two in memory
        await ledger.record_step(outcome, lane.snapshot(), lane.progress)
        self.between.settled.set()
        self.judge(outcome)

    async def _update(self) -> StepOutcome:
        """Run the updates of a step, each as its groups are scored; on shared devices, once all are."""
        outcome = StepOutcome()
        await self.turns.give_to_trainer()
        for batch in self.updates.mini_batches(self.ledger.history.step):
            with traces.MiniBatchSpans(self.ledger.history.step + 1, batch.number) as traced:
                async for rows in self.updates.rows(batch, self.lane):
                    traced.begin(batch.groups)
                    with self.ledger.clock.training(), span("accumulate", {"rljob.rows": len(rows)}):
                        await self.trainer.accumulate(rows, batch.versions)
                self.between.settled.clear()
                with self.ledger.clock.training(), span("apply", links=traced.episodes):
                    outcome.add(batch, await self.trainer.apply(batch.denominator))
        outcome.num_replaced, outcome.num_skipped = self.lane.num_replaced, self.lane.num_skipped
        picked = self.collector.rollouts.replicas.fleet.num_picked
        outcome.turns_by_prefix = dict(picked)
        picked.clear()
        return outcome
