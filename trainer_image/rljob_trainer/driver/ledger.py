"""The driver's bookkeeping: what happened, once, into the history, metrics.jsonl, trackers and the status board.

Owns every counter of a run, so that the driver can read like the algorithm. Invariant: `history` changes only when a
step or an evaluation is complete, and then all at once with its line in metrics.jsonl: a checkpoint taken between two
is exact.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rljob_api.manifest.job import RLJob
from rljob_api.wire.protocol import RolloutWeights, WeightManifest
from rljob_trainer.driver.collection import Progress
from rljob_trainer.driver.evaluation import Evaluated
from rljob_trainer.driver.status import Board
from rljob_trainer.episodes.batches import Group
from rljob_trainer.episodes.prompts import Cursor
from rljob_trainer.episodes.types import UpdateMetrics
from rljob_trainer.history.metrics import Record, append_line, flatten, mean, summarize_step
from rljob_trainer.history.run_state import FILE_METRICS, History, write_summary
from rljob_trainer.history.tracking import Prometheus, Trackers
from rljob_trainer.history.trajectory_log import TrajectoryLog

log = logging.getLogger(__name__)


class Ledger:
    """One incarnation's books; opened on the history that a checkpoint gave."""

    def __init__(
        self,
        job: RLJob,
        run_dir: Path,
        history: History,
        board: Board,
        trackers: Trackers,
        prometheus: Prometheus,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.history = history
        self.weight_digests: dict[str, str] = {}
        self.export: Path | None = None
        self._job = job
        self._run_dir = run_dir
        self._board = board
        self._trackers = trackers
        self._prometheus = prometheus
        self._now = clock
        self._phases: dict[str, float] = {}
        self._step_began = clock()
        self._served: dict[str, RolloutWeights] = {}
        self.trajectories = TrajectoryLog(run_dir, job.spec.tracking.trajectories_mib)
        """The driver flushes it before a checkpoint: what that counts must be there."""
        trackers.restart_at(history.step)
        board.update(step=history.step, total_steps=job.spec.schedule.steps, accuracy=history.accuracy_after)
        board.update(restarts=dict(history.restarts), num_invalid=sum(history.invalid_by_reason.values()))

    # ---- time ----

    @contextmanager
    def phase(self, name: str, waits_for: str = "") -> Iterator[None]:
        """Time spent inside belongs to phase `name`."""
        self._board.enter(name, waits_for)
        began = self._now()
        try:
            yield
        finally:
            self.add_seconds(name, self._now() - began)

    def add_seconds(self, name: str, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self._phases[name] = self._phases.get(name, 0.0) + seconds
        self._prometheus.record_phase(name, seconds)

    def record_collection_seconds(self, progress: Progress, update_seconds: float, total_seconds: float) -> None:
        """Split the time of a collection with its updates: to the last token, then updates, and the rest is the tail of
        rewards that nothing hid."""
        generate = progress.generated_at - progress.started_at
        self.add_seconds("generate", generate)
        self.add_seconds("update", update_seconds)
        self.add_seconds("score", total_seconds - generate - update_seconds)

    def begin_step(self) -> None:
        self._close_phases()  # whatever came between two steps: evaluation, checkpoint
        self._step_began = self._now()

    def _close_phases(self) -> dict[str, float]:
        closed = dict(self._phases)
        for name, seconds in closed.items():
            self.history.phase_seconds[name] = self.history.phase_seconds.get(name, 0.0) + seconds
        self._phases.clear()
        return closed

    # ---- facts ----

    def record_weights(self, manifest: WeightManifest, served: dict[str, RolloutWeights]) -> None:
        """What the rollouts serve after a publication."""
        self._served = served
        self.weight_digests = {"trainer": manifest.checksum} | {a: weights.checksum for a, weights in served.items()}

    def record_step(
        self, groups: Sequence[Group], updates: Sequence[UpdateMetrics], progress: Progress, cursor: Cursor
    ) -> None:
        """A step is done: its weights are published and served."""
        spec, history = self._job.spec, self.history
        pause = mean(weights.pause_seconds for weights in self._served.values())
        transfer = mean(weights.transfer_seconds for weights in self._served.values())
        phases = self._close_phases()
        generate = phases.get("generate", 0.0)
        record: Record = {
            "type": "step",
            "step": history.step + 1,
            "time": time.time(),
            **summarize_step(
                groups,
                updates,
                progress.latencies,
                rewards=spec.rewards,
                zero_std_threshold=spec.algorithm.zero_std_threshold,
            ),
            "tokens_per_second": progress.num_tokens / generate if generate else None,
            "pause_seconds": pause,
            "transfer_seconds": transfer,
            "weight_version": history.step + 1,
            "num_rollouts": len(self._served),
            "epoch": cursor.epoch,
            "phase_seconds": phases,
            "step_seconds": self._now() - self._step_began,
        }
        for name, num_versions in record["reward_versions"].items():
            if num_versions > 1:
                log.warning("step %d: %d versions of reward %s scored it", record["step"], num_versions, name)
        self.trajectories.record("train", history.step + 1, groups)
        self._commit(record)
        history.step += 1
        history.epoch, history.position = cursor.epoch, cursor.position
        history.step_rewards.append(record["reward"])
        history.prompts_trained.append([group.prompt.index for group in groups])
        history.samples_trained += record["num_samples"] - record["num_masked"]
        history.pause_seconds += [] if pause is None else [pause]
        history.transfer_seconds += [] if transfer is None else [transfer]
        history.logprob_difference += [update.logprob_difference for update in updates[:1]]
        num_served = sum(len(t.results) for group in groups for t in group.trajectories)
        self._count_results(record["invalid_by_reason"], num_served)
        self._show_step(record)

    def record_evaluation(self, outcome: Evaluated) -> None:
        history = self.history
        phases = self._close_phases()
        record: Record = {
            "type": "eval",
            "step": history.step,
            "time": time.time(),
            "accuracy": outcome.accuracy,
            "means": outcome.means,
            "num_samples": outcome.num_samples,
            "num_invalid": sum(outcome.invalid_by_reason.values()),
            "invalid_by_reason": outcome.invalid_by_reason,
            "seconds": phases.get("evaluate"),
        }
        self.trajectories.record("eval", history.step, outcome.groups)
        self._commit(record)
        if history.step == 0:
            history.accuracy_before, history.eval_before = outcome.accuracy, outcome.means
        history.accuracy_after, history.eval_after = outcome.accuracy, outcome.means
        history.evaluated_at = history.step
        self._count_results(outcome.invalid_by_reason, outcome.num_samples * len(self._job.spec.rewards))
        self._board.update(accuracy=outcome.accuracy)
        log.info("step %d: accuracy %s, %s", history.step, outcome.accuracy, outcome.means)

    def write_summary(self) -> None:
        self._close_phases()
        write_summary(self._run_dir, self.history, weight_digests=self.weight_digests, export=self.export)

    # ---- helpers ----

    def _commit(self, record: Record) -> None:
        append_line(self._run_dir / FILE_METRICS, record)
        numbers = flatten({name: value for name, value in record.items() if name not in ("step", "time")})
        self._trackers.log(record["type"], record["step"], numbers)

    def _count_results(self, invalid: dict[str, int], num_served: int) -> None:
        history = self.history
        history.rewards_served += num_served
        history.invalid_by_reason = dict(Counter(history.invalid_by_reason) + Counter(invalid))
        self._board.update(num_invalid=sum(history.invalid_by_reason.values()))

    def _show_step(self, record: Record) -> None:
        phases = record["phase_seconds"]
        self._board.update(
            step=record["step"],
            reward=record["reward"],
            tokens_per_second=record["tokens_per_second"],
            reward_latency_p50_seconds=record["reward_latency_p50_seconds"],
            reward_latency_p95_seconds=record["reward_latency_p95_seconds"],
            step_seconds=record["step_seconds"],
            gpu_seconds_per_step=sum(phases.get(name, 0.0) for name in ("generate", "update", "publish", "sync")),
        )
        log.info(
            "step %d: reward %s, invalid %d, logprob difference %s, %.1f s",
            record["step"], record["reward"], record["num_invalid"], record.get("logprob_difference"),
            record["step_seconds"],
        )  # fmt: skip
