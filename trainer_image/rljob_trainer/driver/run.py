"""A run of the driver: the loop, and what happens around it when something dies.

If the trainer group dies, a new one resumes from the last checkpoint. On cancellation, or if a trainer Pod leaves, the
steps since are saved (driver.stopping). Invariant: whatever ends a group, its files are those of one history.
"""

import asyncio
import contextlib
import io
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.run.folder import damaged_checkpoints
from rljob_api.wire.contract import GRACE_SECONDS
from rljob_api.wire.driver_status import DriverStatus, HungPart, LearningReason
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.concurrency import run_in_thread, run_with_watcher
from rljob_trainer.driver.between_steps import BetweenSteps, Cadence
from rljob_trainer.driver.checkpointer import Checkpointer, CheckpointSeconds, Exporter
from rljob_trainer.driver.collection import CollectionPlan, Collector
from rljob_trainer.driver.evaluation import EvalLane, HeldOut
from rljob_trainer.driver.learning import describe_failure, describe_skipped, judge
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.live_status import describe_live
from rljob_trainer.driver.loop import TrainLoop
from rljob_trainer.driver.model_check import ModelCheck
from rljob_trainer.driver.ports import StartTrainer, Trainer, TrainerGroupDiedError
from rljob_trainer.driver.publisher import Publisher
from rljob_trainer.driver.rank_failures import RankFailureLog
from rljob_trainer.driver.reports import Reports, find_problems
from rljob_trainer.driver.run_clock import RunClock
from rljob_trainer.driver.step_clock import StepClock
from rljob_trainer.driver.stopping import NOTHING_TRAINS, LastSave, PodLeavesError
from rljob_trainer.driver.train_lane import TrainLane, read_lane_state
from rljob_trainer.driver.turns import build_turns
from rljob_trainer.driver.updates import StepOutcome, StepUpdates
from rljob_trainer.feed.given_rows import GivenRows
from rljob_trainer.feed.prompt_feed import PromptFeed, PromptSource
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.history.run_state import resume, set_aside
from rljob_trainer.liveness.judge import Pace
from rljob_trainer.mirror.mirror import Mirror
from rljob_trainer.outages import OutageError, Outages
from rljob_trainer.replicas.engines import TrainerEngines
from rljob_trainer.run_folder.file_facts import Checkpoint, DamagedCheckpointError
from rljob_trainer.services.demand import Forecaster

_NUM_TASKS = 50
_NUM_FRAMES = 8


def describe_tasks() -> str:
    """Return the stacks of the running loop's tasks, each stack once, with the number of its tasks."""
    seen: dict[str, int] = {}
    for task in asyncio.all_tasks():
        text = io.StringIO()
        task.print_stack(limit=_NUM_FRAMES, file=text)
        stack = text.getvalue().partition("\n")[2]  # the first line has the task's name
        seen[stack] = seen.get(stack, 0) + 1
    return "\n".join(f"{count} x\n{stack}" for stack, count in list(seen.items())[:_NUM_TASKS])


log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Datasets:
    train: Sequence[PromptSource]
    """In the order of the job."""
    held_out: Mapping[str, Sequence[Prompt]]
    """By the name of an evaluation set."""
    given: GivenRows | None = None
    """Those of the warm start."""


@dataclass(frozen=True)
class DriverParts:
    start_trainer: StartTrainer
    collector: Collector
    """With the clients of the rollouts and of the rewards."""
    reports: Reports
    data: Datasets
    model: str
    """The resolved source of spec.model, for the export."""
    read_spec: Callable[[], RLJobSpec]
    """Reads the current spec."""
    pace: Pace
    """That of steps, and of what else the head watches."""
    engines: TrainerEngines | None = None
    """Rollouts that share the trainer's devices. They sleep when `start_trainer` places ranks."""
    outages: Outages = field(default_factory=Outages)
    """Which of what the job depends on is away."""
    copies: Mirror | None = None
    """The copy of the run's files in object storage. None: there is none."""
    check: ModelCheck | None = None
    """Compares rollouts with the trainer at the start. None: nothing trains."""


class _NoValidSamplesError(UserError):
    """The last steps had no valid sample."""

    def __init__(self, message: str, last_useful: int) -> None:
        """`last_useful`: the last step with one."""
        super().__init__(message)
        self.last_useful = last_useful


class Driver:
    def __init__(
        self,
        job: RLJob,
        run_dir: Path,
        parts: DriverParts,
        head_job_uid: str = "",
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """`head_job_uid`: of the head's Kubernetes Job. Restarts count from zero in each. `grace_seconds`: of the Pods
        of head and trainers."""
        self._spec, self._run_dir, self._parts = job.spec, run_dir, parts
        self._board, self._prometheus = parts.reports.board, parts.reports.prometheus
        self._disk = RunDisk(run_dir, parts.outages)
        self._head_job_uid, self._grace_seconds = head_job_uid, grace_seconds
        self._num_restarts = 0
        self._rank_failures = RankFailureLog(job.spec.trainer)
        self._algorithm = build_algorithm(job.spec)
        self._cadence = Cadence(job.spec.schedule, job.spec.held_out_sets, job.spec.checkpoint.every_steps)
        self._trainer_spec = job.spec
        """Which the ranks follow, as training and evaluation do."""
        self._checkpoint_seconds = 0.0
        """Duration of the last checkpoint, from its beginning to its end, without the export."""
        needs_whole_step = self._algorithm.needs.whole_step
        self._forecaster = Forecaster.of(
            job.spec.schedule, job.spec.algorithm.group_size, needs_whole_step=needs_whole_step
        )
        self._last: LastSave | None = None
        """The one of the last trainer group."""
        self._loop: TrainLoop | None = None
        """Loop of the trainer group; None while none is ready."""
        self._steps = StepClock(parts.pace, time.monotonic())
        self._hung: list[HungPart] = []
        """Ranks that hung, until their group is replaced."""
        self._prometheus.register_rewards(parts.collector.rewards.clients)
        if parts.collector.services is not None and parts.collector.services.clients:
            self._prometheus.register_agent(parts.collector.services.clients)

    async def leave(self) -> str:
        """A trainer Pod is terminated: save, and return what became of the last steps. Any number of Pods may call."""
        return NOTHING_TRAINS if self._loop is None or self._last is None else await self._last.leave()

    @property
    def exit_report(self) -> str:
        """After a cancellation: what became of the last steps."""
        return NOTHING_TRAINS if self._last is None else self._last.report

    async def run(self) -> None:
        """Train. If the trainer group dies, start a new one from the last checkpoint. Deaths count against its backoff
        limit, unless the group lost a node. If the ranks find that checkpoint damaged, use the one before. Raise
        TransientError if the driver itself hangs."""
        await run_with_watcher(self._run_groups(), self._watch_steps())

    async def _run_groups(self) -> None:
        while True:
            try:
                return await self._train()
            except TrainerGroupDiedError as error:
                self._record_death(error)
            except DamagedCheckpointError as error:
                set_aside(self._run_dir, error)

    def describe_live(self, status: DriverStatus) -> DriverStatus:
        """Return `status` with what changes by the second."""
        lanes = None if self._loop is None else (self._loop.lane, self._loop.between.held_out)
        steps, is_done = self._steps, status.phase == "done"
        status.since_step_seconds = None if is_done else steps.seconds
        status.step_limit_seconds = None if is_done or steps.seconds is None else steps.limit_seconds
        status.hung = [*self._hung, *self._parts.collector.list_hung()]
        return describe_live(status, lanes, self._parts.collector, self._forecaster)

    async def _watch_steps(self) -> NoReturn:
        """Raise TransientError if a step is late and no role has work: the driver waits for itself alone."""
        while True:
            read = self._parts.read_spec()  # during an outage, or before a late step, no step ends
            self._parts.outages.limit_seconds, self._parts.pace.bounds = read.outage_seconds, read.hang_detection
            loop = self._loop
            is_over = loop is not None and self._cadence.is_over(loop.ledger.history.step)
            collector = self._parts.collector
            is_idle = loop is not None and collector.phases.phase == "score" and collector.roles.is_idle()
            self._steps.tick(time.monotonic(), is_paused=is_over or self._parts.outages.is_open(), is_idle=is_idle)
            if self._steps.is_stuck:
                if loop is not None:
                    loop.ledger.clock.lose_hung(self._steps.seconds or 0.0)
                log.error("the driver hangs; its tasks:\n%s", describe_tasks())
                raise TransientError(
                    f"the driver hangs: no step for {self._steps.seconds:.0f} s, {self._steps.limit_seconds:.0f} s are "
                    "allowed (spec.hangDetection), and neither trainer, rollouts nor rewards have work"
                )
            await asyncio.sleep(_TICK_SECONDS)

    async def _train(self) -> None:
        """Train with one trainer group, from the last checkpoint."""
        history, checkpoint = await run_in_thread(resume, self._run_dir)
        self._parts.outages.recall(history.answered)
        self._parts.reports.record_damaged(history.step, damaged_checkpoints(self._run_dir))
        if history.head_job_uid == self._head_job_uid:  # the previous driver had restarts, too
            self._num_restarts = max(self._num_restarts, history.restarts.get("trainer", 0))
        history.head_job_uid, history.restarts = self._head_job_uid, {"trainer": self._num_restarts}
        reports, collector = self._parts.reports, self._parts.collector
        clock = RunClock(self._run_dir, history, reports.board, reports.prometheus, collector.roles, collector.phases)
        ledger = Ledger(
            self._run_dir,
            history,
            reports,
            clock,
            algorithm=self._algorithm,
            schedule=self._cadence.schedule,
            spec=self._spec,
            disk=self._disk,
        )
        with clock.until_end():
            await self._train_from(ledger, checkpoint)

    async def _train_from(self, ledger: Ledger, checkpoint: Checkpoint | None) -> None:
        generation = secrets.token_hex(4)
        with ledger.clock.phase("starting", "waits for the trainer group"):
            trainer = await self._parts.start_trainer(
                generation=generation, checkpoint=checkpoint, report=self._board.waits_for
            )
        ledger.record_choices(trainer.choices)
        self._trainer_spec = self._spec
        self._hung = []
        self._steps.begin(is_warm=ledger.history.step < self._spec.schedule.num_warm_steps)
        try:
            self._loop = self._build_loop(trainer, ledger, generation)
            await self._run_loop(self._loop)
        finally:
            self._loop = None
            await ledger.trajectories.close()
            await trainer.close()

    def _build_loop(self, trainer: Trainer, ledger: Ledger, generation: str) -> TrainLoop:
        """Return the loop of `trainer`, whose weights are published as `generation`, from where the ledger's history
        is."""

        def record_checkpoint(seconds: CheckpointSeconds) -> None:
            self._checkpoint_seconds = seconds.wait - seconds.export + seconds.write
            ledger.record_checkpoint(seconds)

        exporter = Exporter(
            self._run_dir,
            trainer,
            self._spec.checkpoint.exported_steps,
            tokenizer_source=self._parts.model,
            disk=self._disk,
            record=ledger.record_export,
        )
        checkpoints = Checkpointer(
            self._run_dir,
            trainer,
            keep=self._spec.checkpoint.keep,
            record=record_checkpoint,
            exporter=exporter,
            disk=self._disk,
            list_kept=lambda: self._list_kept(ledger),
            copies=self._parts.copies,
        )
        spec, parts, collector, seed = self._spec, self._parts, self._parts.collector, self._spec.schedule.seed
        train_plan = CollectionPlan(
            "train", 0, spec.algorithm.group_size, spec.rollout.sampling, seed, generation, spec.training_rewards
        )
        state = read_lane_state(ledger.history)
        lane = TrainLane(
            collector,
            PromptFeed(parts.data.train, state.feed, spec.data.curriculum, seed=seed, shuffle=spec.data.shuffle),
            train_plan,
            spec.schedule,
            self._algorithm,
            state,
            rewards_sleep=bool(spec.models_in_trainer),
        )
        sets = []
        for each in spec.held_out_sets:
            assert each.sampling is not None, "the job's open settings are not resolved"
            rewards = [reward for reward in spec.rewards if reward.name in each.rewards]
            eval_plan = CollectionPlan(
                "eval", 0, each.samples_per_prompt, each.sampling, seed, generation, rewards, each.name
            )
            sets.append(HeldOut(each, parts.data.held_out[each.name], eval_plan))
        held_out = EvalLane(collector, sets)
        turns = build_turns(spec, parts.engines, trainer, ledger, lane, held_out)
        return TrainLoop(
            between=BetweenSteps(
                self._cadence,
                self._follow_spec,
                held_out,
                checkpoints,
                ledger,
                decides_best=spec.evaluation.best.set if spec.evaluation.best else "",
            ),
            trainer=trainer,
            turns=turns,
            lane=lane,
            updates=StepUpdates(
                spec.schedule,
                self._algorithm,
                trainer,
                ledger.clock.training,
                full_tokens=trainer.choices.micro_batch_tokens * spec.trainer.num_ranks,
                given=parts.data.given,
            ),
            publisher=Publisher(
                trainer,
                turns,
                collector.rollouts,
                parts.reports.board,
                ledger,
                held_out,
                has_rollouts=spec.num_rollout_replicas > 0,
                spans_updates=lane.schedule.spans_updates,
            ),
            ledger=ledger,
            exporter=exporter,
            collector=collector,
            forecaster=self._forecaster,
            judge=partial(self._judge, ledger),
            check=parts.check,
        )

    async def _run_loop(self, loop: TrainLoop) -> None:
        last = self._last = LastSave(loop.between, self._grace_seconds)
        try:
            async with loop.lane, loop.between.held_out, loop.publisher:
                # The loop also waits for rollouts and rewards, which do not notice a dead rank.
                await last.run(run_with_watcher(self._run_to_end(loop), loop.trainer.watch()))
        except asyncio.CancelledError:
            await last.save(self._checkpoint_seconds)
            raise
        except PodLeavesError:
            await last.save(self._checkpoint_seconds)
            await self._wait_for_death(loop)
        except Exception as error:
            if isinstance(error, _NoValidSamplesError):
                await self._save_useful_steps(loop, last, error.last_useful)
            elif isinstance(error, OutageError):
                await last.save(self._checkpoint_seconds)
            await loop.between.checkpoints.close(self._grace_seconds / 2)
            raise
        finally:
            last.end()
            await loop.between.checkpoints.close()

    async def _wait_for_death(self, loop: TrainLoop) -> None:
        """A Pod that leaves ends its ranks once it knows that they are saved: only then is its node gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_seconds):
                await loop.trainer.watch()
        error = TrainerGroupDiedError("a trainer Pod got SIGTERM, and has not ended")
        error.lost_node = True
        raise error

    def _list_kept(self, ledger: Ledger) -> set[int]:
        """Return the steps whose checkpoints stay: the best one, and the one that is evaluated now."""
        best, loop = ledger.history.best, self._loop
        kept = set() if best is None else {best.step}
        if loop is not None and self._spec.evaluation.best is not None and loop.between.held_out.step is not None:
            kept.add(loop.between.held_out.step)
        return kept

    async def _run_to_end(self, loop: TrainLoop) -> None:
        await loop.run()
        ledger = loop.ledger
        await loop.publisher.wait()
        with ledger.clock.phase("checkpoint"):
            await loop.between.checkpoints.wait()
        if loop.between.checkpoints.is_owed:
            await loop.between.save()
        with ledger.clock.phase("checkpoint"):
            await loop.exporter.finish(ledger.history, loop.turns.give_to_trainer)
        await ledger.trajectories.flush()
        await ledger.close_trackers()
        await ledger.write_summary()
        self._board.set_phase("done")

    async def _follow_spec(self) -> None:
        """Take the fields that may change while the job runs, which every later decision uses. A group in flight keeps
        the sampling with which it began."""
        read, loop = self._parts.read_spec(), self._loop
        assert loop is not None
        loop.between.checkpoints.keep = read.checkpoint.keep
        loop.ledger.trajectories.max_bytes = read.tracking.trajectories_size.num_bytes
        self._cadence.update(read)
        # The ranks have planned their memory, and the head its prompts, for answers of the length at the start.
        length = {"max_tokens": self._spec.rollout.sampling.max_tokens}
        schedule, sampling = self._cadence.schedule, read.rollout.sampling.model_copy(update=length)
        rollout = self._spec.rollout.model_copy(update={"sampling": sampling})
        spec = self._spec.model_copy(update={"schedule": schedule, "rollout": rollout})
        if spec != self._trainer_spec:
            log.info("the spec changes: %s; the next groups are sampled with %s", schedule, sampling)
            self._board.update(total_steps=schedule.steps)
            loop.lane.plan = replace(loop.lane.plan, sampling=sampling)
            loop.between.held_out.follow(read.held_out_sets)
            await loop.trainer.follow(spec)
            self._trainer_spec = spec

    def _judge(self, ledger: Ledger, outcome: StepOutcome) -> None:
        """A step counts. Report whether the last ones taught anything. Raise UserError if they had no valid sample."""
        self._steps.finish(is_warm=ledger.history.step < self._spec.schedule.num_warm_steps)
        ledger.history.answered = self._parts.outages.answered()
        if failure := describe_skipped(ledger.history.skipped_updates):
            raise UserError(failure)
        counts, step, settings = ledger.steps_without_signal, ledger.history.step, self._algorithm.settings
        schedule, threshold = self._cadence.schedule, settings.algorithm.zero_std_threshold
        learning = judge(counts, step, schedule.max_steps_without_signal, threshold, schedule.num_warm_steps)
        before = self._board.status.learning
        self._board.update(learning=learning, problems=self._parts.reports.problems.failures)  # their counts, too
        if learning.reason == LearningReason.NO_VALID_SAMPLES:
            problems = find_problems(step, outcome.groups)
            message = describe_failure(counts, problems, settings.rewards)
            raise _NoValidSamplesError(message, step - counts.without_valid)
        if learning.is_learning is False and learning.message != before.message:
            log.warning("%s", learning.message)

    async def _save_useful_steps(self, loop: TrainLoop, last: LastSave, last_useful: int) -> None:
        """Save before the job fails, unless a checkpoint has all steps with a valid sample."""
        steps, saving = range(last_useful, loop.ledger.history.step + 1), loop.between.checkpoints.step
        if last_useful > 0 and not any(step == saving or loop.between.checkpoints.exists(step) for step in steps):
            await last.save(self._checkpoint_seconds)
        await loop.ledger.write_summary()

    def _record_death(self, error: TrainerGroupDiedError) -> None:
        self._num_restarts += 1
        self._hung = list(error.hung)
        self._forecaster.record_interruption()
        self._prometheus.restarts.labels("trainer").inc()
        now = time.monotonic()
        self._rank_failures.record(error, now)
        self._board.update(rank_failures=self._rank_failures.report)
        self._rank_failures.check_memory(error, self._board.status.step)
        self._rank_failures.check(error, now)
        why = "it has lost a node" if error.lost_node else "counts against spec.trainer.backoffLimit"
        log.warning("the trainer group died (%s); restarting it from the last checkpoint: %s", why, error)
