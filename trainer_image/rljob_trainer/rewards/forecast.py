"""Predicts the demand of the next collection on the rewards from the previous one: the driver's half of autoscaling.

The reward client measures the latency of a score; the operator computes replicas. Pure: callers pass times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.protocol import Lane, RewardDemand
from rljob_trainer.algorithms.registry import build_algorithm
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
    def __init__(self, samples_per_step: int, group_size: int = 1, *, streams: bool = False) -> None:
        """`streams`: each group trains once it is scored, also during generation. Otherwise the updates begin when all
        groups are scored."""
        self._samples_per_step, self._group_size, self._streams = samples_per_step, group_size, streams
        self._measured: dict[Lane, DemandForecast] = {}
        """Of the last collection: the times alone."""
        self._scored_at: float | None = None
        self._pause_seconds: float | None = None

    @classmethod
    def of(cls, spec: RLJobSpec) -> DemandForecaster:
        size = spec.algorithm.group_size
        streams = spec.schedule.type != "synchronous" and not build_algorithm(spec).needs.whole_step
        return cls(spec.schedule.prompts_per_step * size, size, streams=streams)

    def record_begin(self, now: float) -> None:
        if self._scored_at is not None:
            self._pause_seconds = now - self._scored_at

    def record_interruption(self) -> None:
        """Record that the trainers died. The next collection starts as soon as possible; the gap is not a pause."""
        self._scored_at = None

    def record_end(
        self, progress: CollectionProgress, update_seconds: float, pipeline_seconds: float | None = None
    ) -> None:
        """Record a collection with its updates: the last scores are due when the GPUs have nothing else to do.

        `pipeline_seconds`: for a schedule that scores the episodes of later steps during this one, the work of the
        busier of trainer and rollouts: a step cannot be shorter, and scores must keep up with it.
        """
        if not progress.ended_at:
            return
        last_by_group = {episode.group: episode.ended_at for episode in progress.episodes}
        due_seconds = progress.generate_seconds
        if pipeline_seconds is not None:
            due_seconds = pipeline_seconds
        elif self._streams and progress.lane == "train" and last_by_group:
            # The trainer begins with the first whole group, and only the last one trains after the last score.
            first_seconds = min(last_by_group.values()) - progress.started_at
            early_seconds = update_seconds * (1 - 1 / len(last_by_group))
            due_seconds = max(progress.generate_seconds, first_seconds + early_seconds)
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
        """Predict when scores of the first collection are due: at the end of generation, as updates are unknown."""
        if progress.num_samples and progress.num_generated == progress.num_samples:
            return progress.generate_seconds
        share = progress.num_generated / progress.num_samples if progress.num_samples else 0.0
        return elapsed / share if share >= _MIN_GENERATED_SHARE else None


def _subsample(ends: Sequence[float]) -> tuple[float, ...]:
    return tuple(ends[:: -(-len(ends) // _MAX_ENDS) or 1])
