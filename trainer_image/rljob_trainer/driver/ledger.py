"""The driver's bookkeeping: each fact goes to the history, metrics.jsonl, the trackers and the status board.

Owns every counter of a run, so that the driver reads like the algorithm. Invariant: `history` changes only when a step
or an evaluation is complete, together with its line in metrics.jsonl. A checkpoint between two of them is exact.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.protocol import AgentStatus, BusyShares, RolloutWeights, ScheduleStatus, WeightManifest
from rljob_trainer.driver.checkpointer import CheckpointSeconds
from rljob_trainer.driver.evaluation import EvaluationResult
from rljob_trainer.driver.learning import StepsWithoutSignal, classify_step, count_last_skipped
from rljob_trainer.driver.mismatch import NUM_STEPS, judge_mismatch
from rljob_trainer.driver.overlong import judge_overlong
from rljob_trainer.driver.role_clock import Phase, PhaseClock, RoleClock
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.train_lane import TrainLane
from rljob_trainer.driver.updates import StepOutcome
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.history.metrics import (
    Record,
    append_line,
    count_invalid,
    count_staleness,
    flatten,
    mean,
    summarize_conversations,
    summarize_lengths,
    summarize_schedule,
    summarize_step,
)
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.run_state import FILE_METRICS, History, write_summary
from rljob_trainer.history.tracking import Trackers
from rljob_trainer.history.trajectory_log import Decode, TrajectoryLog
from rljob_trainer.history.versions import find_model_commit

log = logging.getLogger(__name__)

_SHOWN = (
    *("step", "reward", "tokens_per_second", "step_seconds"),
    *("reward_latency_p50_seconds", "reward_latency_p95_seconds"),
)
"""Fields of a step's record that the status has, too."""


@dataclass(frozen=True)
class Reports:
    """Where a run reports to."""

    board: StatusBoard
    trackers: Trackers
    prometheus: PrometheusMetrics
    decode: Decode | None = None
    """Shows the tokens of conversations in the trajectory log."""


class Ledger:
    """The books of one trainer group; it continues the history of a checkpoint."""

    def __init__(
        self, spec: RLJobSpec, run_dir: Path, history: History, reports: Reports, roles: RoleClock, phases: PhaseClock
    ) -> None:
        """`roles`, `phases`: which the lanes feed, too."""
        self.history = history
        self.weight_digests: dict[str, str] = {}
        self.export: Path | None = None
        self._spec, self._run_dir = spec, run_dir
        self._board, self._trackers, self._prometheus = reports.board, reports.trackers, reports.prometheus
        self._roles, self._phases = roles, phases
        self._step_started_at = time.monotonic()
        self._recent: deque[Record] = deque(maxlen=NUM_STEPS)
        self._warnings = ("", "")
        self._served: dict[str, RolloutWeights] = {}
        self.trajectories = TrajectoryLog(run_dir, spec.tracking.trajectories_mib, reports.decode)
        """The driver flushes it before a checkpoint, which counts its samples."""
        self._trackers.restart_at(history.step)
        self._board.update(step=history.step, total_steps=spec.schedule.steps, accuracy=history.accuracy_after)
        schedule = ScheduleStatus(type=spec.schedule.type, max_staleness=spec.schedule.staleness)
        self._board.update(schedule=schedule.model_dump())
        self._board.update(restarts=dict(history.restarts), num_invalid=sum(history.invalid_by_reason.values()))

    @contextmanager
    def phase(self, name: Phase, waits_for: str = "") -> Iterator[None]:
        """Count the time within as that of a phase, unless a phase that takes precedence is active."""
        self._board.set_phase(name, waits_for)
        with self._phases.within(name, time.monotonic):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Within, the trainer computes an update."""
        with self._phases.within("update", time.monotonic), self._roles.working("trainer", time.monotonic):
            yield

    @contextmanager
    def publishing(self) -> Iterator[None]:
        with self.phase("publish"), self._roles.working("trainer", time.monotonic):
            yield

    def pipeline_seconds(self) -> float:
        """Return the work of the busier of trainer and rollouts since the step began."""
        busy = self._roles.busy_seconds(time.monotonic())
        return max(busy["trainer"], busy["rollouts"])

    def begin_step(self) -> None:
        self._close_phases()  # of evaluation and checkpoint, between two steps
        self._step_started_at = time.monotonic()
        self._roles.reset(self._step_started_at)

    def _close_phases(self) -> dict[str, float]:
        closed: dict[str, float] = dict(self._phases.take(time.monotonic()).items())
        for name, seconds in closed.items():
            self.history.phase_seconds[name] = self.history.phase_seconds.get(name, 0.0) + seconds
            self._prometheus.phases.labels(name).inc(seconds)
        return closed

    def record_weights(self, manifest: WeightManifest, served: dict[str, RolloutWeights]) -> None:
        self._served = served
        self.weight_digests = {"trainer": manifest.checksum} | {a: weights.checksum for a, weights in served.items()}

    def record_step(self, outcome: StepOutcome, lane: TrainLane) -> None:
        """Record a step, once its weights are published. Between two steps, so that `lane` fits the weights."""
        record, history = self._describe_step(outcome, lane.progress), self.history
        for name, num_versions in record["reward_versions"].items():
            if num_versions > 1:
                log.warning("step %d: scored by %d versions of reward %s", record["step"], num_versions, name)
        self.trajectories.record("train", record["step"], outcome.groups)
        self._commit(record)
        history.step = record["step"]
        history.lane = lane.snapshot().model_dump(mode="json")
        history.step_rewards.append(record["reward"])
        history.prompts_trained.append([group.prompt.index for group in outcome.groups])
        history.samples_trained += record["num_samples"] - record["num_masked"]
        history.pause_seconds += [] if record["pause_seconds"] is None else [record["pause_seconds"]]
        history.transfer_seconds += [] if record["transfer_seconds"] is None else [record["transfer_seconds"]]
        measured = [update.logprob_difference for update in outcome.updates if update.trained_share]
        history.logprob_difference += measured[:1]
        counts = self.steps_without_signal.after(classify_step(record))
        history.steps_without_valid, history.steps_without_advantage = counts
        history.skipped_updates = count_last_skipped(outcome.updates, history.skipped_updates)
        self._warn(record)
        self._show_step(record)

    def _warn(self, record: Record) -> None:
        """Log what has begun to go wrong in this step."""
        self._recent.append(record)
        before = self._warnings
        self._warnings = judge_mismatch(list(self._recent)), judge_overlong(record, self._spec)
        for text, text_before in zip(self._warnings, before, strict=True):
            if text and not text_before:
                log.warning("%s", text)

    @property
    def steps_without_signal(self) -> StepsWithoutSignal:
        return StepsWithoutSignal(self.history.steps_without_valid, self.history.steps_without_advantage)

    def _describe_step(self, outcome: StepOutcome, progress: CollectionProgress) -> Record:
        spec, step, served, now = self._spec, self.history.step + 1, self._served.values(), time.monotonic()
        generating, shares = self._roles.busy_seconds(now)["rollouts"], self._roles.shares(now)
        num_tokens = sum(episode.num_sampled for episode in progress.episodes)
        staleness = count_staleness((e for group in outcome.groups for e in group.episodes), self.history.step)
        return {
            "type": "step",
            "step": step,
            "time": time.time(),
            **summarize_step(outcome.groups, outcome.updates, list(progress.latency_by_sample.values()), spec),
            "tokens_per_second": num_tokens / generating if generating and num_tokens else None,
            "pause_seconds": mean(weights.pause_seconds for weights in served),
            "transfer_seconds": mean(weights.transfer_seconds for weights in served),
            "weight_version": step,
            "num_rollouts": len(served),
            **summarize_schedule(staleness, dict(shares.items()), outcome.num_replaced),
            "phase_seconds": self._close_phases(),
            "step_seconds": now - self._step_started_at,
        }

    def record_evaluation(self, outcome: EvaluationResult) -> None:
        history = self.history
        episodes = [episode for group in outcome.groups for episode in group.episodes]
        invalid = dict(count_invalid(episodes))
        record: Record = {
            "type": "eval",
            "step": outcome.step,
            "time": time.time(),
            "accuracy": outcome.accuracy,
            "means": outcome.means,
            "num_samples": len(episodes),
            "num_invalid": sum(invalid.values()),
            "invalid_by_reason": invalid,
            **summarize_lengths(episodes),
            **summarize_conversations(episodes),
            "seconds": outcome.seconds,
        }
        self.trajectories.record("eval", outcome.step, outcome.groups)
        self._commit(record)
        if outcome.step == 0:
            history.accuracy_before, history.eval_before = outcome.accuracy, outcome.means
        history.accuracy_after, history.eval_after = outcome.accuracy, outcome.means
        history.evaluated_at = outcome.step
        self._board.update(accuracy=outcome.accuracy)
        log.info("step %d: accuracy %s, %s", outcome.step, outcome.accuracy, outcome.means)

    def record_checkpoint(self, seconds: CheckpointSeconds) -> None:
        """Record a complete checkpoint. Later steps may have ended."""
        self._trackers.log("checkpoint", seconds.step, {"wait_seconds": seconds.wait, "write_seconds": seconds.write})
        log.info("checkpoint of step %d: training waited %.1f s, written in %.1f s", *vars(seconds).values())

    def write_summary(self) -> None:
        self._close_phases()
        write_summary(
            self._run_dir,
            self.history,
            weight_digests=self.weight_digests,
            export=self.export,
            model_commit=find_model_commit(self._spec.model),
        )

    def _commit(self, record: Record) -> None:
        history = self.history
        append_line(self._run_dir / FILE_METRICS, record)
        numbers = flatten({name: value for name, value in record.items() if name not in ("step", "time")})
        self._trackers.log(record["type"], record["step"], numbers)
        num_failed = sum(record.get("agent", {}).get("failures", {}).values())
        history.rewards_served += (record["num_samples"] - num_failed) * len(self._spec.rewards)
        history.invalid_by_reason = dict(Counter(history.invalid_by_reason) + Counter(record["invalid_by_reason"]))
        self._board.update(num_invalid=sum(history.invalid_by_reason.values()))

    def _show_step(self, record: Record) -> None:
        phases = record["phase_seconds"]
        gpu_seconds = sum(phases.get(name, 0.0) for name in ("generate", "update", "publish", "sync"))
        schedule = self._board.status.schedule.model_copy(
            update={
                "trained_staleness_mean": record["staleness_mean"],
                "trained_staleness_max": record["staleness_max"],
                "busy": BusyShares(**record["busy_shares"]),
            }
        )
        agent = record.get("agent") or {}
        self._board.update(agent={name: agent[name] for name in AgentStatus.model_fields if name in agent})
        shown = {name: record[name] for name in _SHOWN}
        self._board.update(gpu_seconds_per_step=gpu_seconds, schedule=schedule.model_dump(), **shown)
        log.info(
            "step %d: reward %s, invalid %d, logprob difference %s, %.1f s",
            record["step"], record["reward"], record["num_invalid"], record.get("logprob_difference"),
            record["step_seconds"],
        )  # fmt: skip
