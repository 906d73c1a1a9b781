"""The training loop: what a step does, and what happens when the trainer group dies.

    data cursor --> groups, as the schedule admits them --> episodes --(tokens)--> rollouts     (train_lane, collection)
                                    |  as soon as one ends
                                    +--> rewards: valid score | invalid with a reason           (rewards)
    groups scored --> advantages --> rows --> trainer.accumulate ... trainer.apply              (updates, algorithms)
    trainer.save --> the ranks write their copies --> COMPLETE, next to the following steps               (checkpointer)
    trainer.publish --> board.announce --> rollouts pull --> rollouts.sync --> next step        (status, replicas)
    held-out prompts --> episodes --> rewards, next to all of this                              (evaluation)

Invariant: a step counts once its weights are served. If anything dies before that, the step is repeated from its
start. On cancellation it saves the completed steps, if that is quick.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.schedule import Schedule
from rljob_api.manifest.status import RewardProblem
from rljob_api.wire.protocol import DriverStatus, Lane, LearningReason, WeightManifest
from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.checkpointer import Checkpointer, CheckpointSeconds
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.evaluation import EvalLane
from rljob_trainer.driver.learning import describe_failure, describe_skipped, judge
from rljob_trainer.driver.ledger import Ledger, Reports
from rljob_trainer.driver.live_status import Forecasters, describe_live
from rljob_trainer.driver.ports import StartTrainer, Trainer, TrainerGroupDiedError
from rljob_trainer.driver.problems import ProblemLog, find_problems
from rljob_trainer.driver.rank_failures import RankFailureLog
from rljob_trainer.driver.train_lane import TrainLane, read_lane_state
from rljob_trainer.driver.updates import StepOutcome, StepUpdates
from rljob_trainer.driver.watcher import run_with_watcher
from rljob_trainer.episodes.types import Episode
from rljob_trainer.history.run_state import checkpoint_exists, export_model, resume

log = logging.getLogger(__name__)

_LAST_CHECKPOINT_SECONDS = 20.0
"""Part of the Pod's grace period that the driver spends on the checkpoint that is being written, and on saving later
steps."""


@dataclass(frozen=True)
class Datasets:
    train: PromptSet
    eval: Sequence[Prompt]


@dataclass(frozen=True)
class DriverParts:
    start_trainer: StartTrainer
    collector: Collector
    """With the clients of the rollouts and of the rewards."""
    reports: Reports
    data: Datasets
    model: str
    """The resolved source of spec.model, for the export."""
    read_schedule: Callable[[], Schedule | None]
    """Reads the current schedule; None: it is still the one at the job's start."""


@dataclass(frozen=True)
class _Group:
    """What belongs to one trainer group."""

    trainer: Trainer
    ledger: Ledger
    checkpoints: Checkpointer
    updates: StepUpdates
    train: TrainLane
    eval: EvalLane


class Driver:
    def __init__(self, job: RLJob, run_dir: Path, parts: DriverParts, head_job_uid: str = "") -> None:
        """`head_job_uid`: of the head's Kubernetes Job. Restarts count from zero in each."""
        self._spec, self._run_dir, self._parts = job.spec, run_dir, parts
        self._board, self._prometheus = parts.reports.board, parts.reports.prometheus
        self._head_job_uid = head_job_uid
        self._num_restarts = 0
        self._rank_failures = RankFailureLog(job.spec.trainer)
        self._initial_steps = job.spec.schedule.steps
        self._matches_history = False
        """Whether the trainer's state is that of the history. Not so from a step's first update until it counts."""
        self._checkpoint_seconds = 0.0
        """Of the last checkpoint, from its beginning to its end."""
        self._forecasters = Forecasters.of(job.spec)
        self._problems = ProblemLog()
        self._group: _Group | None = None
        self._syncing: asyncio.Task[None] | None = None
        """The update of the rollouts to the newest weights, while groups of the next step are generated."""
        self._board.describe_live = self._describe_live
        parts.collector.rollouts.on_mismatch = self._report_mismatch
        parts.collector.on_scored = self._record_scored
        self._prometheus.register_rewards(parts.collector.rewards.clients)
        if (services := parts.collector.services) is not None and services.clients:
            self._prometheus.register_agent(services.clients)
            services.on_call = self._prometheus.record_call

    async def run(self) -> None:
        """Train. If the trainer group dies, start a new one from the last checkpoint. Deaths count against its backoff
        limit, unless the group lost a node."""
        while True:
            try:
                return await self._train()
            except TrainerGroupDiedError as error:
                self._record_death(error)

    async def _train(self) -> None:
        history, checkpoint = resume(self._run_dir)
        if history.head_job_uid == self._head_job_uid:  # the previous driver had restarts, too
            self._num_restarts = max(self._num_restarts, history.restarts.get("trainer", 0))
        history.head_job_uid, history.restarts = self._head_job_uid, {"trainer": self._num_restarts}
        parts, spec = self._parts, self._spec
        ledger = Ledger(spec, self._run_dir, history, parts.reports, parts.collector.roles, parts.collector.phases)
        generation = secrets.token_hex(4)
        with ledger.phase("starting", "waits for the trainer group"):
            trainer = await parts.start_trainer(
                generation=generation, checkpoint=checkpoint, report=self._board.waits_for
            )
        self._matches_history = True
        updates = StepUpdates(spec, build_algorithm(spec), trainer, ledger.training, self._record_update)

        def record(seconds: CheckpointSeconds) -> None:
            self._checkpoint_seconds = seconds.wait + seconds.write
            ledger.record_checkpoint(seconds)

        checkpoints = Checkpointer(self._run_dir, trainer, keep=spec.checkpoint.keep, record=record)
        try:
            async with AsyncExitStack() as stack:
                lane = TrainLane(
                    parts.collector,
                    parts.data.train,
                    spec,
                    generation,
                    read_lane_state(history, spec.schedule.prompts_per_step),
                )
                train = await stack.enter_async_context(lane)
                held_out = EvalLane(parts.collector, parts.data.eval, spec, generation)
                group = _Group(trainer, ledger, checkpoints, updates, train, await stack.enter_async_context(held_out))
                self._group = group
                # The loop also waits for rollouts and rewards, which do not notice a dead rank.
                await run_with_watcher(self._advance(group), trainer.watch())
        except asyncio.CancelledError:
            await self._save_before_exit(checkpoints, ledger)
            raise
        except Exception:
            await checkpoints.close(_LAST_CHECKPOINT_SECONDS)
            raise
        finally:
            self._group = None
            await checkpoints.close()
            if self._syncing is not None:
                self._syncing.cancel()
                await asyncio.gather(self._syncing, return_exceptions=True)
                self._syncing = None
            await ledger.trajectories.close()
            await trainer.close()

    async def _advance(self, group: _Group) -> None:
        history, trainer_steps = group.ledger.history, self._initial_steps
        await self._publish(group, history.step)
        while True:
            group.checkpoints.check()
            if (steps := self._refresh_steps()) != trainer_steps:
                await group.trainer.set_steps(steps)
                trainer_steps = steps
            self._start_evaluation_if_due(group)
            if history.step >= steps:
                await self._finish_evaluation(group, wait=True)
                if self._refresh_steps() > history.step:
                    continue
            if self._checkpoint_is_due(group.ledger):
                await self._checkpoint(group.checkpoints, group.ledger)
            if history.step >= steps:
                break
            await self._step(group)
            await self._finish_evaluation(group, wait=False)
        await self._finish(group)

    async def _step(self, group: _Group) -> None:
        ledger, lane, version = group.ledger, group.train, group.ledger.history.step
        ledger.begin_step()
        self._forecasters.record_begin(self._parts.collector)
        with ledger.phase("score"):  # the time in which neither generation nor the trainer works
            lane.begin_step(self._spec.schedule.steps)
            outcome = await self._run_updates(group)
        lane.finish_step()
        pipeline = ledger.pipeline_seconds() if lane.schedule.max_staleness else None
        self._forecasters.record_end(lane.progress, self._parts.collector, outcome.update_seconds, pipeline)

        await self._publish(group, version + 1)
        await ledger.trajectories.flush()  # of the previous step: never hold two in memory
        ledger.record_step(outcome, lane)
        self._matches_history = True
        await self._check_signal(group, outcome)

    async def _run_updates(self, group: _Group) -> StepOutcome:
        """Run the updates of a step. Raise what fails the update of the rollouts meanwhile: no group of the step ends
        without rollouts that serve its weights."""
        updates = asyncio.create_task(group.updates.run(group.train))
        try:
            if self._syncing is not None:
                await asyncio.wait((updates, self._syncing), return_when=asyncio.FIRST_COMPLETED)
                if self._syncing.done():
                    self._syncing.result()
            return await updates
        finally:
            updates.cancel()
            await asyncio.gather(updates, return_exceptions=True)

    async def _publish(self, group: _Group, version: int) -> None:
        """Publish `version`, and wait until at least one rollout serves it, and soon all healthy ones. If requests may
        run while weights change, the next step begins meanwhile."""
        if self._syncing is not None:
            await self._syncing
        # All completions of an evaluation must come from the same weights.
        with group.ledger.phase("evaluate"):
            await group.eval.wait_until_generated()
        with group.ledger.publishing():
            manifest = await group.trainer.publish(version)
        # Before any group of the next step starts: its tokens must not be older than its ticket.
        self._parts.collector.rollouts.require(manifest)
        await self._board.announce(manifest)
        self._syncing = asyncio.create_task(self._sync(group.ledger, manifest))
        if version == 0 or not group.train.schedule.spans_updates:
            with group.ledger.phase("sync"):
                await self._syncing

    async def _sync(self, ledger: Ledger, manifest: WeightManifest) -> None:
        ledger.record_weights(manifest, await self._parts.collector.rollouts.sync(manifest))

    async def _check_signal(self, group: _Group, outcome: StepOutcome) -> None:
        """Report whether the last steps taught anything. Raise UserError if none of their samples was valid."""
        ledger, board = group.ledger, self._board
        if failure := describe_skipped(ledger.history.skipped_updates):
            raise UserError(failure)
        counts, step = ledger.steps_without_signal, ledger.history.step
        before, learning = board.status.learning, judge(counts, step, self._spec)
        board.update(learning=learning, problems=self._problems.failures)  # their counts, too
        if learning.reason == LearningReason.NO_VALID_SAMPLES:
            await self._save_useful_steps(group, step - counts.without_valid)
            ledger.write_summary()
            raise UserError(describe_failure(counts, find_problems(step, outcome.groups), self._spec))
        if learning.is_learning is False and learning.message != before.message:
            log.warning("%s", learning.message)

    async def _save_useful_steps(self, group: _Group, last_useful: int) -> None:
        """Save before the job fails, unless a checkpoint has all steps with a valid sample."""
        steps, saving = range(last_useful, group.ledger.history.step + 1), group.checkpoints.step
        if last_useful > 0 and not any(step == saving or checkpoint_exists(self._run_dir, step) for step in steps):
            await self._save_before_exit(group.checkpoints, group.ledger)

    def _start_evaluation_if_due(self, group: _Group) -> None:
        step = group.ledger.history.step
        if group.eval.step is None and self._evaluation_is_due(group.ledger):
            group.eval.start(step)

    async def _finish_evaluation(self, group: _Group, *, wait: bool) -> None:
        """Record an evaluation that has ended; with `wait`, wait for its end."""
        with group.ledger.phase("evaluate"):
            result = await group.eval.finish(wait=wait)
        if result is not None:
            group.ledger.record_evaluation(result)

    async def _checkpoint(self, checkpoints: Checkpointer, ledger: Ledger) -> None:
        """Begin a checkpoint. Training waits as long as this takes."""
        with ledger.phase("checkpoint"):
            await ledger.trajectories.flush()
            await checkpoints.save(ledger.history)
        ledger.write_summary()

    async def _save_before_exit(self, checkpoints: Checkpointer, ledger: Ledger) -> None:
        """Wait for the checkpoint that is being written. Then save the steps since, if the trainer holds exactly those.
        An unfinished one is removed."""
        step = ledger.history.step
        try:
            async with asyncio.timeout(_LAST_CHECKPOINT_SECONDS):
                await checkpoints.wait()
                is_quick = self._checkpoint_seconds < _LAST_CHECKPOINT_SECONDS
                if not self._matches_history or not is_quick or step == 0 or checkpoint_exists(self._run_dir, step):
                    return
                await self._checkpoint(checkpoints, ledger)
                await checkpoints.wait()
            log.info("saved step %d before exit", step)
        except Exception as error:  # of any kind: the previous checkpoint is intact, and the exit must not wait
            log.warning("could not save step %d before exit: %s: %s", step, type(error).__name__, error)

    async def _finish(self, group: _Group) -> None:
        ledger = group.ledger
        if self._syncing is not None:
            await self._syncing
        with ledger.phase("checkpoint"):
            await group.checkpoints.wait()
        if self._spec.checkpoint.export:
            with ledger.phase("checkpoint"):
                write = partial(group.trainer.export, tokenizer_source=self._parts.model)
                ledger.export = await export_model(self._run_dir, write)
        await ledger.trajectories.flush()
        ledger.write_summary()
        self._board.set_phase("done")

    def _refresh_steps(self) -> int:
        """Read the mutable fields of the schedule, which every later decision uses. Return the current steps."""
        before, read = self._spec.schedule, self._parts.read_schedule() or self._spec.schedule
        mutable = {"steps": read.steps, "max_steps_without_signal": read.max_steps_without_signal}
        schedule = before.model_copy(update=mutable)
        if schedule != before:
            log.info("spec.schedule changes: %s", ", ".join(f"{name} is {value}" for name, value in mutable.items()))
            self._spec = self._spec.model_copy(update={"schedule": schedule})
            self._board.update(total_steps=schedule.steps)
        return schedule.steps

    def _evaluation_is_due(self, ledger: Ledger) -> bool:
        history, evaluation = ledger.history, self._spec.evaluation
        if not self._parts.data.eval or history.evaluated_at == history.step:
            return False
        return evaluation.at_start if history.step == 0 else self._is_due(evaluation.every_steps, history.step)

    def _checkpoint_is_due(self, ledger: Ledger) -> bool:
        step = ledger.history.step
        is_due = step > 0 and self._is_due(self._spec.checkpoint.every_steps, step)
        return is_due and not checkpoint_exists(self._run_dir, step)

    def _is_due(self, every: int, step: int) -> bool:
        return step >= self._spec.schedule.steps or (every > 0 and step % every == 0)

    def _record_scored(self, lane: Lane, episode: Episode) -> None:
        self._prometheus.record_scored(lane, episode)
        new = self._problems.record(self._board.status.step + (lane == "train"), episode)
        for problem in new:
            log.warning("%s", RewardProblem.of(problem).describe())
        if new:
            self._board.update(problems=self._problems.failures)

    def _record_update(self) -> None:
        self._matches_history = False

    def _record_death(self, error: TrainerGroupDiedError) -> None:
        self._num_restarts += 1
        self._forecasters.record_interruption()
        self._prometheus.restarts.labels("trainer").inc()
        now = time.monotonic()
        self._rank_failures.record(error, now)
        self._board.update(rank_failures=self._rank_failures.report)
        self._rank_failures.check_memory(error, self._board.status.step)
        self._rank_failures.check(error, now)
        why = "it has lost a node" if error.lost_node else "counts against spec.trainer.backoffLimit"
        log.warning("the trainer group died (%s); restarting it from the last checkpoint: %s", why, error)

    def _describe_live(self, status: DriverStatus) -> DriverStatus:
        group, collector = self._group, self._parts.collector
        lanes = None if group is None else (group.train, group.eval)
        return describe_live(status, lanes, collector, self._forecasters)

    def _report_mismatch(self, message: str) -> None:
        log.error("%s", message)
        self._prometheus.mismatches.inc()
