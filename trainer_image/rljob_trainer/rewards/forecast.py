"""Predicts the demand of the next collection on the rewards from the previous one: the driver's half of autoscaling.

The reward client measures the latency of a score; the operator computes replicas. Pure: callers pass times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.protocol import Lane, RewardDemand
from rljob_trainer.episodes.progress import CollectionProgress

_MAX_ENDS = 256
"""Of a collection's end times, how many to keep, evenly spaced."""
_MIN_GENERATED_SHARE = 0.1
"""Share of the first collection that must have been generated before its end is predicted."""


@dataclass(frozen=True)
class DemandForecast:
    """The current collection, or the next one."""

    demand: RewardDemand = field(default_factory=RewardDemand)
    """Without what only the client of a reward measures."""
    ends: tuple[float, ...] = ()
    """Ascending seconds from the start at which samples of the previous collection ended; empty: unknown."""
    group_size: int = 1
    group_ends: tuple[float, ...] = ()
    """The same for the last samples of the groups."""

    def in_groups(self) -> DemandForecast:
        """Return the forecast for a reward that scores groups: it counts groups, which end with their last samples."""
        size, demand = self.group_size, self.demand
        counts = {"samples": -(-demand.samples // size), "expected": -(-demand.expected // size)}
        return DemandForecast(demand.model_copy(update=counts), self.group_ends)

    def plus(self, num_samples: int, num_unscored: int) -> DemandForecast:
        """Return the forecast with the samples of another lane, which runs at the same time."""
        demand = self.demand
        counts = {"samples": demand.samples + num_samples, "expected": demand.expected + num_unscored}
        return replace(self, demand=demand.model_copy(update=counts))

    def window_seconds(self, latency_seconds: float | None) -> float | None:
        due_seconds = self.demand.due_seconds
        if due_seconds is None or not self.ends:
            return due_seconds
        return measure_window(self.ends, due_seconds, latency_seconds or 0.0)


def measure_window(ends: Sequence[float], due_seconds: float, latency_seconds: float) -> float:
    """Return the target time of Little's law for samples that arrive unevenly.

    The samples after each end must be scored until `due_seconds`, or within one latency if that is later. The busiest
    such remainder sets the pace for all.
    """
    n = len(ends)
    whole = max(due_seconds - ends[0], latency_seconds)
    rests = (n * max(due_seconds - end, latency_seconds) / (n - i) for i, end in enumerate(ends[:-1], start=1))
    return min(whole, *rests) if n > 1 else whole


class DemandForecaster:
    def __init__(self, samples_per_step: int, mini_batches: int, group_size: int = 1) -> None:
        """`mini_batches`: parts of a step that are updated on as soon as they are scored."""
        self._samples_per_step, self._mini_batches, self._group_size = samples_per_step, mini_batches, group_size
        self._measured: dict[Lane, DemandForecast] = {}
        """Of the last collection: the times alone."""
        self._scored_at: float | None = None
        self._pause_seconds: float | None = None

    @classmethod
    def of(cls, spec: RLJobSpec) -> DemandForecaster:
        # Normalization by the batch needs the whole batch before the first update.
        mini_batches = 1 if spec.algorithm.normalization == "batch" else spec.schedule.mini_batches
        size = spec.algorithm.group_size
        return cls(spec.schedule.prompts_per_step * size, mini_batches, size)

    def record_begin(self, now: float) -> None:
        if self._scored_at is not None:
            self._pause_seconds = now - self._scored_at

    def record_interruption(self) -> None:
        """Record that the trainers died. The next collection starts as soon as possible; the gap is not a pause."""
        self._scored_at = None

    def record_end(
        self, progress: CollectionProgress, update_seconds: float, pipeline_seconds: float | None = None
    ) -> None:
        """Record a collection with its updates. The last mini-batch determines when the GPUs needed the last scores.

        `pipeline_seconds`: for a schedule that scores the episodes of later steps during this one, the work of the
        busier of trainer and rollouts: a step cannot be shorter, and scores must keep up with it.
        """
        if not progress.ended_at:
            return
        due_seconds = progress.generate_seconds + update_seconds * self._early_share(progress.lane)
        if pipeline_seconds is not None:
            due_seconds = pipeline_seconds
        last_by_group = {episode.group: episode.ended_at for episode in progress.episodes}
        self._measured[progress.lane] = DemandForecast(
            RewardDemand(due_seconds=due_seconds),
            ends=_subsample([end - progress.started_at for end in progress.ended_at]),
            group_ends=_subsample(sorted(end - progress.started_at for end in last_by_group.values())),
        )
        self._scored_at = progress.scored_at

    def predict(self, progress: CollectionProgress, now: float, *, is_open: bool, is_last: bool) -> DemandForecast:
        """Return the forecast. `is_open`: `progress` is of the current collection. `is_last`: none follows it."""
        lane: Lane = progress.lane if is_open else "train"
        measured = self._measured.get(lane, DemandForecast())
        # After the last collection these still describe it: the next job starts with them.
        demand = RewardDemand(is_first=lane not in self._measured, due_seconds=measured.demand.due_seconds)
        if is_open:
            demand.samples, demand.is_open = progress.num_samples, True
            demand.expected = progress.num_unscored
            demand.elapsed_seconds = now - progress.started_at
            demand.due_seconds = demand.due_seconds or self._predict_due(progress, demand.elapsed_seconds)
        elif not is_last:
            demand.samples = demand.expected = self._samples_per_step
            if self._pause_seconds is not None and self._scored_at is not None:
                demand.starts_in_seconds = max(0.0, self._pause_seconds - (now - self._scored_at))
        return replace(measured, demand=demand, group_size=progress.group_size if is_open else self._group_size)

    def _predict_due(self, progress: CollectionProgress, elapsed: float) -> float | None:
        """Predict when scores of the first collection are due. Assume that updates take as long as generation."""
        if progress.num_samples and progress.num_generated == progress.num_samples:
            generate = progress.generate_seconds
        else:
            share = progress.num_generated / progress.num_samples if progress.num_samples else 0.0
            if share < _MIN_GENERATED_SHARE:
                return None
            generate = elapsed / share
        return generate * (1 + self._early_share(progress.lane))

    def _early_share(self, lane: Lane) -> float:
        """Return the share of a step's updates that happen before the last mini-batch."""
        return (self._mini_batches - 1) / self._mini_batches if lane == "train" else 0.0


def _subsample(ends: Sequence[float]) -> tuple[float, ...]:
    return tuple(ends[:: -(-len(ends) // _MAX_ENDS) or 1])
