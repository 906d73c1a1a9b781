"""The driver's bookkeeping: each fact goes to the history, metrics.jsonl, the trackers and the status board.

Owns every counter of a run, so that the driver reads like the algorithm. Invariant: `history` changes only when a step
or an evaluation is complete, together with its line in metrics.jsonl. A checkpoint between two of them is exact.

`choose_best` is pure. Only evaluations of the set that decides count, and of equal steps the first one stays.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rljob_api.manifest import evaluation as manifest
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.schedule import Schedule
from rljob_api.run.folder import FILE_DRIVER_SUMMARY, FILE_METRICS, damaged_checkpoints
from rljob_api.run.metrics import (
    AgentNumbers,
    AnyRecord,
    CheckpointRecord,
    EpisodeNumbers,
    EvaluationRecord,
    RewardNumbers,
    StepRecord,
    TurnNumbers,
    append_records,
)
from rljob_api.run.summaries import BestStep, DeliveryCounts, DriverSummary, format_summary
from rljob_api.wire.driver_status import AgentStatus, BusyShares, ScheduleStatus, TrainerChoices
from rljob_api.wire.weights import EnginesReport, RolloutWeights, WeightManifest
from rljob_inputs.models.config import EXPORTED_ADAPTER, MIN_MERGED_SHARE
from rljob_trainer.algorithms.base import AlgorithmCode
from rljob_trainer.driver.checkpointer import CheckpointSeconds
from rljob_trainer.driver.evaluation import EvaluationResult
from rljob_trainer.driver.learning import StepsWithoutSignal, classify_step, count_last_skipped
from rljob_trainer.driver.reports import Reports
from rljob_trainer.driver.run_clock import RunClock
from rljob_trainer.driver.step_warnings import NUM_STEPS, describe_loss, judge_merging, judge_mismatch, judge_overlong
from rljob_trainer.driver.train_lane import LaneState
from rljob_trainer.driver.updates import StepOutcome
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Group
from rljob_trainer.history.disk import DiskError, RunDisk, write_durably
from rljob_trainer.history.metrics import (
    count_staleness,
    mean,
    summarize_episodes,
    summarize_rewards,
    summarize_schedule,
    summarize_updates,
)
from rljob_trainer.history.run_state import History, name_checkpoint, write_best
from rljob_trainer.history.trajectory_log import TrajectoryLog
from rljob_trainer.history.versions import find_model_commit, find_versions


def choose_best(
    before: BestStep | None, wanted: manifest.BestStep | None, records: Iterable[EvaluationRecord]
) -> BestStep | None:
    """Return the best step after the evaluations `records`. `before`: the one until then, which does not count if
    something else decides now."""
    if wanted is None:
        return None
    best = before if before is not None and (before.set, before.metric) == (wanted.set, wanted.metric) else None
    for record in records:
        found = _read(record, wanted) if record.set == wanted.set else None
        if found is not None and (best is None or found.value > best.value):
            best = found
    return best


def describe_unknown(wanted: manifest.BestStep | None, records: Iterable[EvaluationRecord]) -> str:
    """Return why a step that the set has evaluated cannot be the best one; empty if it can."""
    unknown = [r for r in records if wanted is not None and r.set == wanted.set and _read(r, wanted) is None]
    if wanted is None or not unknown:
        return ""
    remedy = "; let a reward of the set return pred, the answer that it reads" * (wanted.metric == "majority")
    return f"spec.evaluation.best: step {unknown[-1].step} has no {wanted.metric} of {wanted.set}{remedy}"


def _read(record: EvaluationRecord, wanted: manifest.BestStep) -> BestStep | None:
    """Return the number of a record's step; None if it is unknown."""
    if wanted.metric.startswith("pass@"):
        k = int(wanted.metric.removeprefix("pass@"))
        value, low, high = record.pass_at.get(k), record.pass_at_low.get(k), record.pass_at_high.get(k)
    elif wanted.metric == "majority":
        value, low, high = record.majority, record.majority_low, record.majority_high
    else:
        value, low, high = record.accuracy, record.accuracy_low, record.accuracy_high
    if value is None:
        return None
    return BestStep(set=record.set, metric=wanted.metric, value=value, low=low, high=high, step=record.step)


log = logging.getLogger(__name__)

_GPU_PHASES = ("generate", "update", "publish", "sleep", "wake", "sync")


class Ledger:
    """The books of one trainer group; it continues the history of a checkpoint."""

    def __init__(
        self,
        run_dir: Path,
        history: History,
        reports: Reports,
        clock: RunClock,
        *,
        algorithm: AlgorithmCode,
        schedule: Schedule,
        spec: RLJobSpec,
        disk: RunDisk,
    ) -> None:
        """`schedule`: as it is now."""
        self.history, self.clock, self._spec = history, clock, spec
        self._main_set = next((each.name for each in spec.held_out_sets), "")
        """The evaluation set whose accuracy is that of the run."""
        self._success = spec.data.curriculum.success if spec.data.curriculum else None
        self.weight_digests: dict[str, str] = {}
        self.export: Path | None = None
        self.export_step: int | None = None
        self.export_merged_share: float | None = None
        """How much of the adapters' update the weights of the export have."""
        self.choices: TrainerChoices | None = None
        self._run_dir, self._algorithm = run_dir, algorithm
        self._board, self._trackers, self._prometheus = reports.board, reports.trackers, reports.prometheus
        self._recent: deque[StepRecord] = deque(maxlen=NUM_STEPS)
        self._warnings = ("", "", "")
        self._served: dict[str, RolloutWeights] = {}
        self._merged_share: float | None = None
        self._digest = ""
        """Digest of the weights that were published last."""
        self._turns = TurnNumbers()
        """Those of the step."""
        self._tracked: dict[str, DeliveryCounts] = {}
        self.disk = disk
        num_bytes = spec.tracking.trajectories_size.num_bytes
        self.trajectories = TrajectoryLog(run_dir, num_bytes, reports.decode, disk)
        """The driver flushes it before a checkpoint, which counts its samples."""
        self._trackers.restart_at(history.step)
        self._board.update(step=history.step, total_steps=schedule.steps, accuracy=history.accuracy_after)
        self._board.update(accuracies=history.accuracies)
        history.best = choose_best(history.best, spec.evaluation.best, ())
        self._name_best()
        status = ScheduleStatus(type=schedule.type, max_staleness=schedule.staleness)
        self._board.update(schedule=status.model_dump())
        self._board.update(restarts=dict(history.restarts), num_invalid=sum(history.invalid_by_reason.values()))

    def begin_step(self) -> None:
        self.clock.begin_step()
        self._turns = TurnNumbers()

    def record_turn(self, seconds: Mapping[str, float], num_bytes: Mapping[str, int], report: EnginesReport) -> None:
        """Record a change of turns, of the step or before the first one."""
        self._turns = TurnNumbers(
            turn_seconds={**self._turns.turn_seconds, **seconds},
            device_bytes={**self._turns.device_bytes, **num_bytes},
            num_engine_restarts=report.num_restarts,
        )

    def record_published(self, manifest: WeightManifest) -> None:
        self._merged_share, self._digest = manifest.merged_share, manifest.checksum

    def record_weights(self, manifest: WeightManifest, served: dict[str, RolloutWeights]) -> None:
        self._served = served
        self.weight_digests = {"trainer": manifest.checksum} | {a: weights.checksum for a, weights in served.items()}

    async def record_step(self, outcome: StepOutcome, lane: LaneState, progress: CollectionProgress) -> None:
        """Record a step, once its weights are published. `lane`: which fits them, between two steps. Waits while the
        disk has no room."""
        record, history = await self._describe_step(outcome, progress), self.history
        for name, num_versions in record.reward_versions.items():
            if num_versions > 1:
                log.warning("step %d: scored by %d versions of reward %s", record.step, num_versions, name)
        self.trajectories.record("train", record.step, outcome.groups)
        await self._append([record])
        num_results = sum(len(episode.results) for group in outcome.groups for episode in group.episodes)
        self._count(record, outcome.groups, num_results)
        history.step, history.trained_seconds = record.step, self.clock.time.trained
        history.lane = lane.model_dump(mode="json")
        history.samples_trained += record.num_samples - record.num_masked
        counts = self.steps_without_signal.after(classify_step(record))
        history.steps_without_valid, history.steps_without_advantage = counts
        history.skipped_updates = count_last_skipped(outcome.updates, history.skipped_updates)
        self._warn(record)
        self._show_step(record)

    def _warn(self, record: StepRecord) -> None:
        """Log what has begun to go wrong in this step."""
        self._recent.append(record)
        before, settings = self._warnings, self._algorithm.settings
        self._warnings = judge_mismatch(list(self._recent)), judge_overlong(record, settings), judge_merging(record)
        for text, text_before in zip(self._warnings, before, strict=True):
            if text and not text_before:
                log.warning("%s", text)

    @property
    def steps_without_signal(self) -> StepsWithoutSignal:
        return StepsWithoutSignal(self.history.steps_without_valid, self.history.steps_without_advantage)

    async def _describe_step(self, outcome: StepOutcome, progress: CollectionProgress) -> StepRecord:
        step, served, now, ended_at = self.history.step + 1, self._served.values(), time.monotonic(), time.time()
        clock = self.clock
        generating, shares = clock.roles.busy_seconds(now)["rollouts"], clock.roles.shares(now)
        phases, latencies = clock.close(), list(progress.latency_by_sample.values())
        generated = list(progress.episodes)

        def summarize() -> tuple[EpisodeNumbers, RewardNumbers, Counter[int], int]:
            episodes = [episode for group in outcome.groups for episode in group.episodes]
            return (
                summarize_episodes(episodes),
                summarize_rewards(outcome.groups, latencies, self._algorithm, self._success),
                count_staleness(episodes, step - 1),
                sum(episode.num_sampled for episode in generated),
            )

        # It reads each token and each episode, and others wait for the loop.
        episodes, rewards, staleness, num_tokens = await asyncio.to_thread(summarize)
        return StepRecord(
            step=step,
            time=ended_at,
            # StepRecord inherits from these types, so it has each of their fields.
            **vars(episodes),
            **vars(rewards),
            **vars(
                summarize_updates(
                    outcome.updates,
                    has_reference=self._algorithm.settings.algorithm.kl.coefficient > 0,
                    is_given=bool(outcome.given),
                )
            ),
            **vars(
                summarize_schedule(
                    staleness,
                    dict(shares.items()),
                    outcome.num_replaced,
                    outcome.num_skipped,
                    outcome.turns_by_prefix,
                )
            ),
            **vars(self._turns),
            tokens_per_second=num_tokens / generating if generating and num_tokens else None,
            pause_seconds=mean(weights.pause_seconds for weights in served),
            transfer_seconds=mean(weights.transfer_seconds for weights in served),
            transfer_bytes=mean(weights.transfer_bytes for weights in served),
            weight_version=step,
            weight_digest=self._digest,
            merged_share=self._merged_share,
            num_rollouts=len(served),
            phase_seconds=phases,
            step_seconds=now - clock.step_started_at,
            prompts=outcome.given or [group.prompt.index for group in outcome.groups],
            prompt_sources=["warmStart"] * len(outcome.given)
            or [group.prompt.source for group in outcome.groups if group.prompt.source],
            training_share=clock.time.share,
            lost_seconds=clock.lost_seconds,
        )

    async def record_evaluation(self, outcome: EvaluationResult) -> None:
        history, now = self.history, time.time()
        numbers = [await asyncio.to_thread(summarize_episodes, found.episodes) for found in outcome.sets]
        records = [
            EvaluationRecord(
                step=outcome.step,
                time=now,
                set=found.held_out.name,
                samples_per_prompt=found.held_out.samples_per_prompt,
                num_prompts=len(found.groups),
                num_results=sum(len(episode.results) for episode in found.episodes),
                **vars(of_set),
                **vars(found.figures),
                means={**found.means},
                seconds=found.seconds,
            )
            for found, of_set in zip(outcome.sets, numbers, strict=True)
        ]
        self.trajectories.record("eval", outcome.step, outcome.groups)
        await self._append(records)  # together: a checkpoint has all sets of a step, or none
        for found, record in zip(outcome.sets, records, strict=True):
            self._count(record, found.groups, record.num_results)
            history.evaluated_at[record.set] = record.step
            self._show_evaluation(record)
        history.best = choose_best(history.best, self._spec.evaluation.best, records)
        if unknown := describe_unknown(self._spec.evaluation.best, records):
            log.warning("%s", unknown)
        self._name_best()

    def _show_evaluation(self, record: EvaluationRecord) -> None:
        history = self.history
        if record.set == self._main_set:
            if record.step == 0:
                history.accuracy_before, history.eval_before = record.accuracy, record.means
            history.accuracy_after, history.eval_after = record.accuracy, record.means
            self._board.update(accuracy=record.accuracy)
        history.accuracies = {name: value for name, value in history.accuracies.items() if name != record.set}
        if record.accuracy is not None:
            history.accuracies[record.set] = record.accuracy
        self._board.update(accuracies=history.accuracies)
        log.info(
            "step %d, %s: accuracy %s (%d failed, %d left out), %s",
            *(record.step, record.set, record.accuracy, record.num_failed, record.num_left_out, record.means),
        )

    def _name_best(self) -> None:
        """Name the best step in best.json and in the status."""
        best = self.history.best
        self._board.update(best_step=best and best.step, best_value=best and best.value)
        try:
            write_best(self._run_dir, best)
        except DiskError as error:  # the next evaluation or checkpoint writes it again
            log.warning("cannot write the best step: %s", error)

    def record_export(self, folder: Path, step: int, merged_share: float | None) -> None:
        self.export, self.export_step, self.export_merged_share = folder, step, merged_share
        if merged_share is not None and merged_share < MIN_MERGED_SHARE:
            log.warning(
                "%s: its merged weights have %.0f%% of the adapters' update, and %s the whole update; %s",
                folder, 100 * merged_share, folder / EXPORTED_ADAPTER, describe_loss(),
            )  # fmt: skip

    def record_choices(self, choices: TrainerChoices) -> None:
        self.choices = choices
        self._board.update(choices=choices.model_dump())

    def record_checkpoint(self, seconds: CheckpointSeconds) -> None:
        """Record a complete checkpoint. Later steps may have ended."""
        self._track(CheckpointRecord(step=seconds.step, wait_seconds=seconds.wait, write_seconds=seconds.write))
        self._name_best()  # whose checkpoint this may be
        waited = seconds.wait
        log.info(
            "checkpoint of step %d: training waited %.1f s, written in %.1f s", seconds.step, waited, seconds.write
        )

    async def write_summary(self) -> None:
        """Write driver-summary.json, from which `rljob run` builds summary.json."""
        self.clock.close()
        history, time = self.history, self.clock.time
        summary = DriverSummary(
            steps=history.step,
            phase_seconds=history.phase_seconds,
            training_share=time.share,
            lost_seconds=dict(time.lost.items()),
            samples_trained=history.samples_trained,
            rewards_served=history.rewards_served,
            invalid_by_reason=history.invalid_by_reason,
            accuracy_before=history.accuracy_before,
            accuracy_after=history.accuracy_after,
            eval_before=history.eval_before,
            eval_after=history.eval_after,
            best=history.best and name_checkpoint(self._run_dir, history.best),
            restarts=history.restarts,
            weight_digests=self.weight_digests,
            export=str(self.export) if self.export else None,
            export_step=self.export_step,
            export_merged_share=self.export_merged_share,
            versions=find_versions(),
            model_commit=find_model_commit(self._spec.model),
            choices=self.choices,
            damaged_checkpoints=damaged_checkpoints(self._run_dir),
            trackers=self._tracked,
        )
        path = self._run_dir / FILE_DRIVER_SUMMARY
        await self.disk.write(path, lambda: write_durably(path, format_summary(summary)))

    async def close_trackers(self) -> None:
        """Give the trackers some seconds for what they have not sent, for the summary."""
        self._tracked = await self._trackers.close()

    def _track(self, record: AnyRecord, groups: Sequence[Group] = ()) -> None:
        self._prometheus.log(record)
        self._trackers.log(record, groups)

    async def _append(self, records: Sequence[StepRecord | EvaluationRecord]) -> None:
        metrics = self._run_dir / FILE_METRICS
        self.history.metrics_bytes = await self.disk.write(metrics, lambda: append_records(metrics, records))

    def _count(self, record: StepRecord | EvaluationRecord, groups: Sequence[Group], num_results: int) -> None:
        """Count a record that metrics.jsonl has. `num_results`: of rewards, valid or not."""
        history = self.history
        self._track(record, groups)
        history.rewards_served += num_results
        history.invalid_by_reason = dict(Counter(history.invalid_by_reason) + Counter(record.invalid_by_reason))
        self._board.update(num_invalid=sum(history.invalid_by_reason.values()))

    def _show_step(self, record: StepRecord) -> None:
        phases = record.phase_seconds
        gpu_seconds = sum(phases.get(name, 0.0) for name in _GPU_PHASES)
        schedule = self._board.status.schedule.model_copy(
            update={
                "trained_staleness_mean": record.staleness_mean,
                "trained_staleness_max": record.staleness_max,
                "busy": BusyShares(**record.busy_shares),
                "prefix_hits": record.prefix_share("hit"),
            }
        )
        self._board.update(
            step=record.step,
            reward=record.reward,
            tokens_per_second=record.tokens_per_second,
            step_seconds=record.step_seconds,
            reward_latency_p50_seconds=record.reward_latency_p50_seconds,
            reward_latency_p95_seconds=record.reward_latency_p95_seconds,
            gpu_seconds_per_step=gpu_seconds,
            schedule=schedule.model_dump(),
            agent=(record.agent or AgentNumbers()).model_dump(include=set(AgentStatus.model_fields)),
        )
        log.info(
            "step %d: reward %s, invalid %d, logprob difference %s, %.1f s",
            record.step, record.reward, record.num_invalid, record.logprob_difference, record.step_seconds,
        )  # fmt: skip
