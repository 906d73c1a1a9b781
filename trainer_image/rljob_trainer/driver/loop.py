"""The training loop: what a step does, and what happens when the trainer group dies.

    data cursor --> prompts --> agent loops --(tokens)--> rollouts                 (collection, agents, replicas)
                                    |  as soon as one ends
                                    +--> rewards: valid score | invalid with a reason          (rewards)
    groups scored --> advantages (valid only) --> mini-batch --> trainer.update       (updates, episodes.batches)
    trainer.publish --> board.announce --> rollouts pull --> rollouts.sync --> next step    (status, replicas)

Invariant: a step counts once its weights are served. If anything dies before that, the step is repeated from its
start. On cancellation it saves the completed steps, if that is quick.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.schedule import Schedule
from rljob_api.wire.protocol import DriverStatus, Lane, LearningReason
from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.collection import CollectionPlan, Collector
from rljob_trainer.driver.evaluation import evaluate, plan_evaluation
from rljob_trainer.driver.learning import describe_failure, judge
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.live_status import describe_live
from rljob_trainer.driver.ports import StartTrainer, Trainer, TrainerGroupDiedError
from rljob_trainer.driver.problems import ProblemLog, find_problems
from rljob_trainer.driver.rank_failures import RankFailureLog
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.updates import StepOutcome, run_updates
from rljob_trainer.driver.watcher import run_with_watcher
from rljob_trainer.episodes.cursor import Cursor, take
from rljob_trainer.episodes.types import Episode
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.run_state import checkpoint_exists, disk_errors, resume, save_checkpoint
from rljob_trainer.history.tracking import Trackers
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.clients import RewardClients
from rljob_trainer.rewards.forecast import DemandForecaster

log = logging.getLogger(__name__)

_LAST_CHECKPOINT_SECONDS = 20.0
"""Part of the Pod's grace period that the driver spends on saving the steps since the last checkpoint."""


@dataclass(frozen=True)
class DriverComponents:
    start_trainer: StartTrainer
    rollouts: RolloutClient
    rewards: RewardClients
    collector: Collector
    board: StatusBoard
    trackers: Trackers
    prometheus: PrometheusMetrics
    train: PromptSet
    eval: Sequence[Prompt]
    model: str
    read_schedule: Callable[[], Schedule | None]
    """Reads the current schedule; None: it is still the one at the job's start."""


class Driver:
    def __init__(self, job: RLJob, run_dir: Path, components: DriverComponents, head_job_uid: str = "") -> None:
        """`head_job_uid`: of the head's Kubernetes Job. Restarts count from zero in each."""
        self._spec, self._run_dir, self._components = job.spec, run_dir, components
        self._head_job_uid = head_job_uid
        self._num_restarts = 0
        self._rank_failures = RankFailureLog(job.spec.trainer)
        self._initial_steps = job.spec.schedule.steps
        self._matches_history = False
        """Whether the trainer's state is that of the history. Not so from a step's first update until it counts."""
        self._checkpoint_seconds = 0.0
        self._forecaster = DemandForecaster.of(job.spec)
        self._problems = ProblemLog()
        components.board.describe_live = self._describe_live
        components.rollouts.on_mismatch = self._report_mismatch
        components.collector.on_scored = self._record_scored
        components.prometheus.register_rewards(components.rewards.clients)

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
        parts = self._components
        ledger = Ledger(self._spec, self._run_dir, history, parts.board, parts.trackers, parts.prometheus)
        generation = secrets.token_hex(4)
        with ledger.phase("starting", "waits for the trainer group"):
            trainer = await parts.start_trainer(
                generation=generation, checkpoint=checkpoint, report=parts.board.waits_for
            )
        self._matches_history = True
        try:
            # The loop also waits for rollouts and rewards, which do not notice a dead rank.
            await run_with_watcher(self._advance(trainer, ledger, generation), trainer.watch())
        except asyncio.CancelledError:
            await self._save_before_exit(trainer, ledger)
            raise
        finally:
            await ledger.trajectories.close()
            await trainer.close()

    async def _advance(self, trainer: Trainer, ledger: Ledger, generation: str) -> None:
        history, trainer_steps = ledger.history, self._initial_steps
        await self._publish(trainer, ledger, history.step)
        while True:
            if (steps := self._refresh_steps()) != trainer_steps:
                await trainer.set_steps(steps)
                trainer_steps = steps
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
        spec, history, parts = self._spec, ledger.history, self._components
        ledger.begin_step()
        cursor = Cursor(history.epoch, history.position)
        count, seed = spec.schedule.prompts_per_step, spec.schedule.seed
        prompts, cursor = take(parts.train, cursor, count, seed=seed, shuffle=spec.data.shuffle)
        group_size, sampling = spec.algorithm.group_size, spec.rollout.sampling
        plan = CollectionPlan("train", history.step + 1, group_size, sampling, seed, generation)

        parts.board.set_phase("generate")
        started_at = time.monotonic()
        self._forecaster.record_begin(started_at)
        async with parts.collector.collect(prompts, plan) as collection:
            outcome = await run_updates(
                collection, trainer, spec, set_phase=parts.board.set_phase, before_update=self._record_update
            )
        progress = collection.progress
        ledger.record_collection_seconds(progress, outcome.update_seconds, time.monotonic() - started_at)
        self._forecaster.record_end(progress, outcome.update_seconds)

        await self._publish(trainer, ledger, history.step + 1)
        await ledger.trajectories.flush()  # of the previous step: never hold two in memory
        ledger.record_step(outcome, progress, cursor)
        self._matches_history = True
        await self._check_signal(trainer, ledger, outcome)

    async def _check_signal(self, trainer: Trainer, ledger: Ledger, outcome: StepOutcome) -> None:
        """Report whether the last steps taught anything. Raise UserError if none of their samples was valid."""
        board, counts, step = self._components.board, ledger.steps_without_signal, ledger.history.step
        before, learning = board.status.learning, judge(counts, step, self._spec)
        board.update(learning=learning, problems=self._problems.failures)  # their counts, too
        if learning.reason == LearningReason.NO_VALID_SAMPLES:
            await self._save_useful_steps(trainer, ledger, step - counts.without_valid)
            ledger.write_summary()
            raise UserError(describe_failure(counts, find_problems(step, outcome.groups), self._spec))
        if learning.is_learning is False and learning.message != before.message:
            log.warning("%s", learning.message)

    async def _save_useful_steps(self, trainer: Trainer, ledger: Ledger, last_useful: int) -> None:
        """Save before the job fails, unless a checkpoint has all steps with a valid sample."""
        is_saved = any(checkpoint_exists(self._run_dir, step) for step in range(last_useful, ledger.history.step + 1))
        if last_useful > 0 and not is_saved:
            await self._save_before_exit(trainer, ledger)

    async def _publish(self, trainer: Trainer, ledger: Ledger, version: int) -> None:
        """Publish `version`, and wait until at least one rollout serves it, and soon all healthy ones."""
        with ledger.phase("publish"):
            manifest = await trainer.publish(version)
            await self._components.board.announce(manifest)
        with ledger.phase("sync"):
            ledger.record_weights(manifest, await self._components.rollouts.sync(manifest))

    async def _evaluate(self, ledger: Ledger, generation: str) -> None:
        parts = self._components
        self._forecaster.record_begin(time.monotonic())
        with ledger.phase("evaluate"):
            collection = parts.collector.collect(
                parts.eval, plan_evaluation(self._spec, ledger.history.step, generation)
            )
            outcome = await evaluate(collection, self._spec.evaluation.accuracy)
        self._forecaster.record_end(collection.progress, 0.0)
        ledger.record_evaluation(outcome)

    async def _checkpoint(self, trainer: Trainer, ledger: Ledger) -> None:
        started_at = time.monotonic()
        with ledger.phase("checkpoint"):
            await ledger.trajectories.flush()
            await save_checkpoint(self._run_dir, ledger.history, trainer.save, keep=self._spec.checkpoint.keep)
        self._checkpoint_seconds = time.monotonic() - started_at
        ledger.write_summary()

    async def _save_before_exit(self, trainer: Trainer, ledger: Ledger) -> None:
        """Save steps since the last checkpoint, if the trainer holds exactly those. An unfinished one is removed."""
        step = ledger.history.step
        is_quick = self._checkpoint_seconds < _LAST_CHECKPOINT_SECONDS
        if not self._matches_history or not is_quick or step == 0 or checkpoint_exists(self._run_dir, step):
            return
        try:
            async with asyncio.timeout(_LAST_CHECKPOINT_SECONDS):
                await self._checkpoint(trainer, ledger)
            log.info("saved step %d before exit", step)
        except Exception as error:  # of any kind: the previous checkpoint is intact, and the exit must not wait
            log.warning("could not save step %d before exit: %s: %s", step, type(error).__name__, error)

    async def _finish(self, trainer: Trainer, ledger: Ledger) -> None:
        if self._spec.checkpoint.export:
            folder = self._run_dir / "export"
            with ledger.phase("checkpoint"), disk_errors(folder):
                await trainer.export(folder, self._components.model)
            ledger.export = folder
        await ledger.trajectories.flush()
        ledger.write_summary()
        self._components.board.set_phase("done")

    def _refresh_steps(self) -> int:
        """Read the mutable fields of the schedule, which every later decision uses. Return the current steps."""
        before, read = self._spec.schedule, self._components.read_schedule() or self._spec.schedule
        mutable = {"steps": read.steps, "max_steps_without_signal": read.max_steps_without_signal}
        schedule = before.model_copy(update=mutable)
        if schedule != before:
            log.info("spec.schedule changes: %s", ", ".join(f"{name} is {value}" for name, value in mutable.items()))
            self._spec = self._spec.model_copy(update={"schedule": schedule})
            self._components.board.update(total_steps=schedule.steps)
        return schedule.steps

    def _evaluation_is_due(self, ledger: Ledger) -> bool:
        history, evaluation = ledger.history, self._spec.evaluation
        if not self._components.eval or history.evaluated_at == history.step:
            return False
        return evaluation.at_start if history.step == 0 else self._is_due(evaluation.every_steps, history.step)

    def _checkpoint_is_due(self, ledger: Ledger) -> bool:
        step = ledger.history.step
        is_due = step > 0 and self._is_due(self._spec.checkpoint.every_steps, step)
        return is_due and not checkpoint_exists(self._run_dir, step)

    def _is_due(self, every: int, step: int) -> bool:
        return step >= self._spec.schedule.steps or (every > 0 and step % every == 0)

    def _record_scored(self, lane: Lane, episode: Episode) -> None:
        parts = self._components
        parts.prometheus.record_scored(lane, episode)
        new = self._problems.record(parts.board.status.step + (lane == "train"), episode)
        for problem in new:
            log.warning("reward %s: no valid score (%s): %s", problem.reward, problem.reason, problem.message)
        if new:
            parts.board.update(problems=self._problems.failures)

    def _record_update(self) -> None:
        self._matches_history = False

    def _record_death(self, error: TrainerGroupDiedError) -> None:
        self._num_restarts += 1
        self._forecaster.record_interruption()
        self._components.prometheus.restarts.labels("trainer").inc()
        now = time.monotonic()
        self._rank_failures.record(error, now)
        self._components.board.update(rank_failures=self._rank_failures.report)
        self._rank_failures.check(error, now)
        why = "it has lost a node" if error.lost_node else "counts against spec.trainer.backoffLimit"
        log.warning("the trainer group died (%s); restarting it from the last checkpoint: %s", why, error)

    def _describe_live(self, status: DriverStatus) -> DriverStatus:
        parts = self._components
        return describe_live(status, parts.collector.progress, parts.rewards, parts.rollouts, self._forecaster)

    def _report_mismatch(self, message: str) -> None:
        log.error("%s", message)
        self._components.prometheus.mismatches.inc()
