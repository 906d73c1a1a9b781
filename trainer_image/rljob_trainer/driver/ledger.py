"""The driver's bookkeeping: each fact goes to the history, metrics.jsonl, the trackers and the status board.

Owns every counter of a run, so that the driver reads like the algorithm. Invariant: `history` changes only when a step
or an evaluation is complete, together with its line in metrics.jsonl. A checkpoint between two of them is exact.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.protocol import RolloutWeights, WeightManifest
from rljob_trainer.driver.evaluation import EvaluationResult
from rljob_trainer.driver.learning import StepsWithoutSignal, classify_step
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.updates import StepOutcome
from rljob_trainer.episodes.cursor import Cursor
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.history.metrics import (
    Record,
    append_line,
    count_invalid,
    flatten,
    mean,
    summarize_lengths,
    summarize_step,
)
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.run_state import FILE_METRICS, History, write_summary
from rljob_trainer.history.tracking import Trackers
from rljob_trainer.history.trajectory_log import TrajectoryLog
from rljob_trainer.history.versions import find_model_commit

log = logging.getLogger(__name__)

_SHOWN = (
    *("step", "reward", "tokens_per_second", "step_seconds"),
    *("reward_latency_p50_seconds", "reward_latency_p95_seconds"),
)
"""Fields of a step's record that the status has, too."""


class Ledger:
    """The books of one trainer group; it continues the history of a checkpoint."""

    def __init__(
        self,
        spec: RLJobSpec,
        run_dir: Path,
        history: History,
        board: StatusBoard,
        trackers: Trackers,
        prometheus: PrometheusMetrics,
    ) -> None:
        self.history = history
        self.weight_digests: dict[str, str] = {}
        self.export: Path | None = None
        self._spec, self._run_dir = spec, run_dir
        self._board, self._trackers, self._prometheus = board, trackers, prometheus
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._step_started_at = time.monotonic()
        self._served: dict[str, RolloutWeights] = {}
        self.trajectories = TrajectoryLog(run_dir, spec.tracking.trajectories_mib)
        """The driver flushes it before a checkpoint, which counts its samples."""
        trackers.restart_at(history.step)
        board.update(step=history.step, total_steps=spec.schedule.steps, accuracy=history.accuracy_after)
        board.update(restarts=dict(history.restarts), num_invalid=sum(history.invalid_by_reason.values()))

    @contextmanager
    def phase(self, name: str, waits_for: str = "") -> Iterator[None]:
        self._board.set_phase(name, waits_for)
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.add_seconds(name, time.monotonic() - started_at)

    def add_seconds(self, name: str, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self._phases[name] += seconds
        self._prometheus.phases.labels(name).inc(seconds)

    def record_collection_seconds(
        self, progress: CollectionProgress, update_seconds: float, total_seconds: float
    ) -> None:
        """Split the time into generation up to the last token, updates, and scoring: the rest, a wait for rewards."""
        generate = progress.generate_seconds
        self.add_seconds("generate", generate)
        self.add_seconds("update", update_seconds)
        self.add_seconds("score", total_seconds - generate - update_seconds)

    def begin_step(self) -> None:
        self._close_phases()  # of evaluation and checkpoint, between two steps
        self._step_started_at = time.monotonic()

    def _close_phases(self) -> dict[str, float]:
        closed, self._phases = dict(self._phases), defaultdict(float)
        for name, seconds in closed.items():
            self.history.phase_seconds[name] = self.history.phase_seconds.get(name, 0.0) + seconds
        return closed

    def record_weights(self, manifest: WeightManifest, served: dict[str, RolloutWeights]) -> None:
        self._served = served
        self.weight_digests = {"trainer": manifest.checksum} | {a: weights.checksum for a, weights in served.items()}

    def record_step(self, outcome: StepOutcome, progress: CollectionProgress, cursor: Cursor) -> None:
        """Record a step, once its weights are published and served."""
        record, history = self._describe_step(outcome, progress, cursor), self.history
        for name, num_versions in record["reward_versions"].items():
            if num_versions > 1:
                log.warning("step %d: scored by %d versions of reward %s", record["step"], num_versions, name)
        self.trajectories.record("train", record["step"], outcome.groups)
        self._commit(record)
        history.step = record["step"]
        history.epoch, history.position = cursor.epoch, cursor.position
        history.step_rewards.append(record["reward"])
        history.prompts_trained.append([group.prompt.index for group in outcome.groups])
        history.samples_trained += record["num_samples"] - record["num_masked"]
        history.pause_seconds += [] if record["pause_seconds"] is None else [record["pause_seconds"]]
        history.transfer_seconds += [] if record["transfer_seconds"] is None else [record["transfer_seconds"]]
        history.logprob_difference += [update.logprob_difference for update in outcome.updates[:1]]
        counts = self.steps_without_signal.after(classify_step(record))
        history.steps_without_valid, history.steps_without_advantage = counts
        self._show_step(record)

    @property
    def steps_without_signal(self) -> StepsWithoutSignal:
        return StepsWithoutSignal(self.history.steps_without_valid, self.history.steps_without_advantage)

    def _describe_step(self, outcome: StepOutcome, progress: CollectionProgress, cursor: Cursor) -> Record:
        spec, step, served = self._spec, self.history.step + 1, self._served.values()
        phases = self._close_phases()
        num_tokens, generate = sum(t.num_sampled for t in progress.episodes), phases.get("generate", 0.0)
        return {
            "type": "step",
            "step": step,
            "time": time.time(),
            **summarize_step(outcome.groups, outcome.updates, list(progress.latency_by_sample.values()), spec),
            "tokens_per_second": num_tokens / generate if generate else None,
            "pause_seconds": mean(weights.pause_seconds for weights in served),
            "transfer_seconds": mean(weights.transfer_seconds for weights in served),
            "weight_version": step,
            "num_rollouts": len(served),
            "epoch": cursor.epoch,
            "phase_seconds": phases,
            "step_seconds": time.monotonic() - self._step_started_at,
        }

    def record_evaluation(self, outcome: EvaluationResult) -> None:
        history, phases = self.history, self._close_phases()
        episodes = [episode for group in outcome.groups for episode in group.episodes]
        invalid = dict(count_invalid(episodes))
        record: Record = {
            "type": "eval",
            "step": history.step,
            "time": time.time(),
            "accuracy": outcome.accuracy,
            "means": outcome.means,
            "num_samples": len(episodes),
            "num_invalid": sum(invalid.values()),
            "invalid_by_reason": invalid,
            **summarize_lengths(episodes),
            "seconds": phases.get("evaluate"),
        }
        self.trajectories.record("eval", history.step, outcome.groups)
        self._commit(record)
        if history.step == 0:
            history.accuracy_before, history.eval_before = outcome.accuracy, outcome.means
        history.accuracy_after, history.eval_after = outcome.accuracy, outcome.means
        history.evaluated_at = history.step
        self._board.update(accuracy=outcome.accuracy)
        log.info("step %d: accuracy %s, %s", history.step, outcome.accuracy, outcome.means)

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
        history.rewards_served += record["num_samples"] * len(self._spec.rewards)
        history.invalid_by_reason = dict(Counter(history.invalid_by_reason) + Counter(record["invalid_by_reason"]))
        self._board.update(num_invalid=sum(history.invalid_by_reason.values()))

    def _show_step(self, record: Record) -> None:
        phases = record["phase_seconds"]
        gpu_seconds = sum(phases.get(name, 0.0) for name in ("generate", "update", "publish", "sync"))
        self._board.update(gpu_seconds_per_step=gpu_seconds, **{name: record[name] for name in _SHOWN})
        log.info(
            "step %d: reward %s, invalid %d, logprob difference %s, %.1f s",
            record["step"], record["reward"], record["num_invalid"], record.get("logprob_difference"),
            record["step_seconds"],
        )  # fmt: skip
