"""What the next collection will ask of the rewards, by what the last one did: the driver's half of autoscaling. Pure.

Owns when samples come, when their scores are wanted, and how long the pause between two collections is. Leaves how long
a score takes to the reward client, and how many replicas that makes to the operator. Times are seconds of one clock
that the caller passes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rljob_api.wire.protocol import Lane

if TYPE_CHECKING:
    from rljob_api.manifest.job import RLJobSpec
    from rljob_trainer.driver.collection import Progress

_MAX_ENDS = 256
"""Of a collection's ends, evenly spaced ones that are kept."""
_FIRST_SHARE = 0.1
"""Share of the first collection that must have been generated before its end is foretold."""


@dataclass(frozen=True)
class Outlook:
    """The collection under way, or the one to come. See RewardDemand."""

    samples: int = 0
    expected: int = 0
    is_open: bool = False
    is_first: bool = False
    starts_in_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    due_seconds: float | None = None
    ends: tuple[float, ...] = ()
    """Ascending seconds from the begin at which samples ended, the last time; empty: not known."""
    group_size: int = 1
    group_ends: tuple[float, ...] = ()
    """The same, at which the last samples of the groups ended."""

    def in_groups(self) -> Outlook:
        """For a reward that scores groups: what is asked of it counts groups, which end with their last samples."""
        size = max(1, self.group_size)
        samples, expected = -(-self.samples // size), -(-self.expected // size)
        return replace(self, samples=samples, expected=expected, ends=self.group_ends, group_size=1)

    def window_seconds(self, latency_seconds: float | None) -> float | None:
        if self.due_seconds is None or not self.ends:
            return self.due_seconds
        return measure_window(self.ends, self.due_seconds, latency_seconds or 0.0)


def measure_window(ends: Sequence[float], due_seconds: float, latency_seconds: float) -> float:
    """Little's target for samples that do not come evenly. Those after each end are scored until `due_seconds`, or in
    the time of one when that is later; the busiest such rest sets the pace of all."""
    n = len(ends)
    whole = max(due_seconds - ends[0], latency_seconds)
    rests = (n * max(due_seconds - end, latency_seconds) / (n - i) for i, end in enumerate(ends[:-1], start=1))
    return min(whole, *rests) if n > 1 else whole


class Forecast:
    """Fed at the begin and at the end of each collection."""

    def __init__(self, samples_a_step: int, mini_batches: int, group_size: int = 1) -> None:
        """`mini_batches`: parts of a step that are updated on as soon as they are scored."""
        self._samples_a_step, self._mini_batches, self._group_size = samples_a_step, mini_batches, group_size
        self._due: dict[Lane, float] = {}
        self._ends: dict[Lane, tuple[float, ...]] = {}
        self._group_ends: dict[Lane, tuple[float, ...]] = {}
        self._scored_at: float | None = None
        self._pause_seconds: float | None = None

    @classmethod
    def of(cls, spec: RLJobSpec) -> Forecast:
        # Normalisation by the batch needs the whole batch before the first update.
        mini_batches = 1 if spec.algorithm.normalization == "batch" else spec.schedule.mini_batches
        size = spec.algorithm.group_size
        return cls(spec.schedule.prompts_per_step * size, mini_batches, size)

    def record_begin(self, now: float) -> None:
        if self._scored_at is not None:
            self._pause_seconds = now - self._scored_at

    def record_interruption(self) -> None:
        """The trainers died. The next collection begins as soon as it can, and the time until then is no pause."""
        self._scored_at = None

    def record_end(self, progress: Progress, update_seconds: float) -> None:
        """A collection is scored and updated on. The GPUs wanted its last scores for the last mini-batch."""
        ends = sorted(end - progress.started_at for end in progress.ended_at)
        if not ends:
            return
        early = update_seconds * (self._mini_batches - 1) / self._mini_batches if progress.lane == "train" else 0.0
        self._due[progress.lane] = ends[-1] + early
        self._ends[progress.lane] = _thin(ends)
        self._group_ends[progress.lane] = _thin(sorted(end - progress.started_at for end in progress.group_ended_at))
        self._scored_at = progress.scored_at

    def foretell(self, progress: Progress, now: float, *, is_open: bool, is_last: bool) -> Outlook:
        """`is_open`: `progress` is of the collection under way. `is_last`: no other comes after it."""
        if not is_open:
            if is_last:  # what it took is told all the same: the next job begins with it
                return Outlook(
                    is_first="train" not in self._due,
                    due_seconds=self._due.get("train"),
                    ends=self._ends.get("train", ()),
                    group_size=self._group_size,
                    group_ends=self._group_ends.get("train", ()),
                )
            pause = 0.0 if self._pause_seconds is None or self._scored_at is None else self._pause_seconds
            left = max(0.0, pause - (now - (self._scored_at or now)))
            return Outlook(
                samples=self._samples_a_step,
                expected=self._samples_a_step,
                is_first="train" not in self._due,
                starts_in_seconds=left,
                due_seconds=self._due.get("train"),
                ends=self._ends.get("train", ()),
                group_size=self._group_size,
                group_ends=self._group_ends.get("train", ()),
            )
        elapsed = now - progress.started_at
        return Outlook(
            samples=progress.num_samples,
            expected=progress.num_samples - progress.num_scored,
            is_open=True,
            is_first=progress.lane not in self._due,
            elapsed_seconds=elapsed,
            due_seconds=self._due.get(progress.lane) or self._project(progress, elapsed),
            ends=self._ends.get(progress.lane, ()),
            group_size=progress.group_size,
            group_ends=self._group_ends.get(progress.lane, ()),
        )

    def _project(self, progress: Progress, elapsed: float) -> float | None:
        """When the scores of the first collection are due, by its part that is generated. Updates are reckoned to take
        as long as generation."""
        if progress.num_samples and progress.num_generated == progress.num_samples:
            generate = progress.generated_at - progress.started_at
        else:
            share = progress.num_generated / progress.num_samples if progress.num_samples else 0.0
            if share < _FIRST_SHARE:
                return None
            generate = elapsed / share
        early = (self._mini_batches - 1) / self._mini_batches if progress.lane == "train" else 0.0
        return generate * (1 + early)


def _thin(ends: Sequence[float]) -> tuple[float, ...]:
    """Evenly spaced ones of them."""
    return tuple(ends[:: -(-len(ends) // _MAX_ENDS) or 1])
