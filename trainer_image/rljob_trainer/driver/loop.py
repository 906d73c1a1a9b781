"""The training loop, and nothing else: what a step does, and what happens when the trainer group dies.

    data cursor --> prompts --> agent loops --(tokens)--> rollouts                      (collection, agents, rollouts)
                                    |  the moment one ends
                                    +--> rewards: valid score | invalid with a reason   (rewards)
    groups scored --> advantages (valid alone) --> mini-batch --> trainer.update        (updating, batches, advantages)
    trainer.publish --> board.announce --> rollouts pull --> rollouts.sync --> next step      (status, rollouts)

Consumes prompts; produces weights. Waits for rollouts, rewards and the trainer group, which unblock it or fail for
good. Invariant: a step counts once its weights are served; whatever dies before that, the step is done again from its
start. When it is cancelled it saves what counts, if that can be done soon.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rljob_api.errors import TransientError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.protocol import DriverStatus
from rljob_trainer.driver.collection import Collector, Plan
from rljob_trainer.driver.evaluation import evaluate
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.live_status import describe_live
from rljob_trainer.driver.status import Board
from rljob_trainer.driver.updates import Trainer, update_on
from rljob_trainer.episodes.prompts import Cursor, Prompt, take
from rljob_trainer.history.run_state import checkpoint_is_there, disk_errors, resume, save_checkpoint
from rljob_trainer.history.tracking import Prometheus, Trackers
from rljob_trainer.ranks.group import TrainerGroupDied
from rljob_trainer.replicas.rollout_client import Rollouts
from rljob_trainer.rewards.clients import Rewards
from rljob_trainer.rewards.forecast import Forecast

log = logging.getLogger(__name__)

_LAST_CHECKPOINT_SECONDS = 20.0
"""Of the time that a Pod has to end, what the driver spends on saving the steps since the last checkpoint."""

StartTrainer = Callable[[str, Path | None, Callable[[str], None]], Awaitable[Trainer]]
"""(generation, checkpoint, report) -> a trainer group that is ready."""


@dataclass(frozen=True)
class Parts:
    """Everything that the loop drives."""

    start_trainer: StartTrainer
    rollouts: Rollouts
    rewards: Rewards
    collector: Collector
    board: Board
    trackers: Trackers
    prometheus: Prometheus
    train: Sequence[Prompt]
    eval: Sequence[Prompt]
    model: str
    read_steps: Callable[[], int | None] = lambda: None
    """schedule.steps as the user wants it now; None: nothing is known but what the job began with."""


class Driver:
    """Runs the job to its end."""

    def __init__(self, job: RLJob, run_dir: Path, parts: Parts, life: str = "") -> None:
        """`life`: of the job; restarts count from zero in each."""
        self._job, self._spec, self._run_dir, self._parts = job, job.spec, run_dir, parts
        self._life = life
        self._num_restarts = 0
        self._began_with_steps = job.spec.schedule.steps
        self._is_exact = False
        """Whether the trainer's state is that of the history: not from a step's first update until the step counts."""
        self._checkpoint_seconds = 0.0
        self._forecast = Forecast.of(job.spec)
        parts.board.describe_live = self._describe_live
        parts.rollouts.on_mismatch = self._report_mismatch
        parts.collector.on_scored = parts.prometheus.record_scored
        parts.prometheus.watch(parts.rewards)

    async def run(self) -> None:
        """Train; when the trainer group dies, start it anew from the last checkpoint, within its budget."""
        while True:
            try:
                return await self._train()
            except TrainerGroupDied as error:
                self._record_death(error)

    async def _train(self) -> None:
        """The algorithm, over one life of a trainer group."""
        history, checkpoint = resume(self._run_dir)
        if history.life == self._life:  # the driver of before had restarts, too
            self._num_restarts = max(self._num_restarts, history.restarts.get("trainer", 0))
        history.life, history.restarts = self._life, {"trainer": self._num_restarts}
        parts = self._parts
        ledger = Ledger(self._job, self._run_dir, history, parts.board, parts.trackers, parts.prometheus)
        generation = secrets.token_hex(4)
        with ledger.phase("starting", "waits for the trainer group"):
            trainer = await parts.start_trainer(generation, checkpoint, parts.board.waits_for)
        self._is_exact = True
        try:
            # The loop waits for rollouts and rewards too, which cannot tell it of a dead rank.
            await do_under(trainer.watch(), self._advance(trainer, ledger, generation))
        except asyncio.CancelledError:
            await self._save_soon(trainer, ledger)
            raise
        finally:
            await ledger.trajectories.close()
            await trainer.close()

    async def _advance(self, trainer: Trainer, ledger: Ledger, generation: str) -> None:
        """From the step of the history to the last one."""
        history, told_steps = ledger.history, self._began_with_steps
        await self._publish(trainer, ledger, history.step)
        while True:
            if (steps := self._adopt_steps()) != told_steps:
                await trainer.set_steps(steps)
                told_steps = steps
            if self._evaluation_is_due(ledger):
                await self._evaluate(ledger, generation)
            elif self._checkpoint_is_due(ledger):
                await self._checkpoint(trainer, ledger)
            elif history.step < steps:
                await self._step(trainer, ledger, generation)
            else:
                break
        await self._finish(trainer, ledger)

    async def _step(self, trainer: Trainer, ledger: Ledger, generation: str) -> None:
        """Sample and score one batch of groups, update on it, and have the new weights served."""
        spec, history, parts = self._spec, ledger.history, self._parts
        ledger.begin_step()
        cursor = Cursor(history.epoch, history.position)
        count, seed = spec.schedule.prompts_per_step, spec.schedule.seed
        rows, cursor = take(len(parts.train), cursor, count, seed=seed, shuffle=spec.data.shuffle)
        prompts = [parts.train[row] for row in rows]
        plan = Plan("train", history.step + 1, spec.algorithm.group_size, spec.rollout.sampling, seed, generation)

        parts.board.enter("generate")
        began = time.monotonic()
        self._forecast.record_begin(began)
        scored = parts.collector.collect(prompts, plan)
        progress = parts.collector.progress
        outcome = await update_on(
            scored, trainer, spec, progress, parts.board, self._record_update, parts.collector.settle
        )
        ledger.record_collection_seconds(progress, outcome.update_seconds, time.monotonic() - began)
        self._forecast.record_end(progress, outcome.update_seconds)

        await self._publish(trainer, ledger, history.step + 1)
        await ledger.trajectories.flush()  # of the step before, which is done by now: never two in memory
        ledger.record_step(outcome.groups, outcome.updates, progress, cursor)
        self._is_exact = True

    async def _publish(self, trainer: Trainer, ledger: Ledger, version: int) -> None:
        """Have `version` served: by one rollout at least, and by all that are well."""
        with ledger.phase("publish"):
            manifest = await trainer.publish(version)
            await self._parts.board.announce(manifest)
        with ledger.phase("sync"):
            ledger.record_weights(manifest, await self._parts.rollouts.sync(manifest))

    async def _evaluate(self, ledger: Ledger, generation: str) -> None:
        self._forecast.record_begin(time.monotonic())
        with ledger.phase("evaluate"):
            outcome = await evaluate(
                self._parts.collector, self._parts.eval, self._job, step=ledger.history.step, incarnation=generation
            )
        self._forecast.record_end(self._parts.collector.progress, 0.0)
        ledger.record_evaluation(outcome)

    async def _checkpoint(self, trainer: Trainer, ledger: Ledger) -> None:
        began = time.monotonic()
        with ledger.phase("checkpoint"):
            await ledger.trajectories.flush()
            await save_checkpoint(self._run_dir, ledger.history, trainer.save, keep=self._spec.checkpoint.keep)
        self._checkpoint_seconds = time.monotonic() - began
        ledger.write_summary()

    async def _save_soon(self, trainer: Trainer, ledger: Ledger) -> None:
        """The process shall end: save the steps since the last checkpoint, where the trainer holds just them. What is
        not complete in time has no COMPLETE, and the next driver removes it."""
        step = ledger.history.step
        is_quick = self._checkpoint_seconds < _LAST_CHECKPOINT_SECONDS
        if not self._is_exact or not is_quick or step == 0 or checkpoint_is_there(self._run_dir, step):
            return
        try:
            async with asyncio.timeout(_LAST_CHECKPOINT_SECONDS):
                await self._checkpoint(trainer, ledger)
            log.info("saved step %d before the end", step)
        except Exception as error:  # whatever it is, the checkpoint before it stands, and the end must not wait
            log.warning("step %d was not saved before the end: %s: %s", step, type(error).__name__, error)

    async def _finish(self, trainer: Trainer, ledger: Ledger) -> None:
        if self._spec.checkpoint.export:
            folder = self._run_dir / "export"
            with ledger.phase("checkpoint"), disk_errors(folder):
                await trainer.export(folder, self._parts.model)
            ledger.export = folder
        await ledger.trajectories.flush()
        ledger.write_summary()
        self._parts.board.enter("done")

    def _adopt_steps(self) -> int:
        """schedule.steps as it is now; every later decision is by it."""
        steps = self._parts.read_steps()
        if steps is not None and steps != self._spec.schedule.steps:
            log.info("schedule.steps changes from %d to %d", self._spec.schedule.steps, steps)
            schedule = self._spec.schedule.model_copy(update={"steps": steps})
            self._spec = self._spec.model_copy(update={"schedule": schedule})
            self._job = self._job.model_copy(update={"spec": self._spec})
            self._parts.board.update(total_steps=steps)
        return self._spec.schedule.steps

    def _evaluation_is_due(self, ledger: Ledger) -> bool:
        history, evaluation = ledger.history, self._spec.evaluation
        if not self._parts.eval or history.evaluated_at == history.step:
            return False
        return evaluation.at_start if history.step == 0 else self._is_due(evaluation.every_steps, history.step)

    def _checkpoint_is_due(self, ledger: Ledger) -> bool:
        step = ledger.history.step
        if step == 0 or not self._is_due(self._spec.checkpoint.every_steps, step):
            return False
        return not checkpoint_is_there(self._run_dir, step)

    def _is_due(self, every: int, step: int) -> bool:
        """After every `every` steps, and after the last one."""
        return step >= self._spec.schedule.steps or (every > 0 and step % every == 0)

    def _record_update(self) -> None:
        self._is_exact = False

    def _record_death(self, error: TrainerGroupDied) -> None:
        self._num_restarts += 1
        self._forecast.record_interruption()
        self._parts.prometheus.record_restart("trainer")
        limit = self._spec.trainer.backoff_limit
        if self._num_restarts > limit:
            raise TransientError(
                f"the trainer group died {self._num_restarts} times and spec.trainer.backoffLimit is {limit}: {error}"
            ) from error
        log.warning("the trainer group died; it starts again from the last checkpoint: %s", error)

    def _describe_live(self, status: DriverStatus) -> DriverStatus:
        parts = self._parts
        return describe_live(status, parts.collector.progress, parts.rewards, parts.rollouts, self._forecast)

    def _report_mismatch(self, message: str) -> None:
        log.error("%s", message)
        self._parts.prometheus.record_mismatch()


async def do_under(watch: Coroutine[Any, Any, NoReturn], work: Coroutine[Any, Any, None]) -> None:
    """Do `work` to its end, or until `watch` raises: what it waits for may then never come."""
    watching, working = asyncio.create_task(watch), asyncio.create_task(work)
    try:
        await asyncio.wait((watching, working), return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and not working.done():
            watching.result()
        working.result()
    finally:
        for task in (watching, working):
            task.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)
