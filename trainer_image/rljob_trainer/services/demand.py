"""Predicts the demand on all services from the last steps: the driver's half of their autoscaling. Pure.

    rewards        slots = samples x seconds of a score / time in which they must be scored (measure_window)
    runner         an episode holds a slot from its start to its end: slots = episodes in flight at once
    user, tools    slots = episodes x seconds of their calls / time in which the step's episodes are played

A client measures its calls (`ServiceLoad`); the operator computes replicas. Callers pass times. Invariant: the demand
on a service of the agent is never 0 while a call waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rljob_api.manifest.schedule import Schedule
from rljob_api.wire.base import Lane
from rljob_api.wire.driver_status import RewardDemand
from rljob_trainer.episodes.progress import CollectionProgress


@dataclass(frozen=True)
class CallTotals:
    """Totals of one lane, since the driver started."""

    num_calls: int = 0
    """Those with a result."""
    busy_seconds: float = 0.0
    """Their executions, retries included."""
    wait_seconds: float = 0.0
    """What else they took, and for how long the present waits for a replica have lasted."""

    def since(self, earlier: CallTotals) -> CallTotals:
        return CallTotals(
            self.num_calls - earlier.num_calls,
            self.busy_seconds - earlier.busy_seconds,
            max(0.0, self.wait_seconds - earlier.wait_seconds),
        )


@dataclass(frozen=True)
class ServiceLoad:
    holds_slots: bool = False
    """Whether a call lasts for a whole episode: it is a runner."""
    in_flight: int = 0
    """Calls without a result, and readers of a tool's functions that wait for a replica."""
    waiting: int = 0
    """Those of them that no replica has."""
    oldest_in_flight_seconds: float = 0.0
    """Age of the oldest of the others on its replica."""
    latency_seconds: float | None = None
    """Mean execution time of recent calls."""
    latency_p95_seconds: float | None = None
    totals: Mapping[Lane, CallTotals] = field(default_factory=dict)

    def total(self, lane: Lane) -> CallTotals:
        return self.totals.get(lane, CallTotals())


_MAX_ENDS = 256
"""Limit of a collection's end times, how many to keep, evenly spaced."""
_MIN_GENERATED_SHARE = 0.1
"""Share of the first collection that must have been generated before its end is predicted."""


@dataclass(frozen=True)
class ScoreForecast:
    """The samples of the current collection, or of the next one."""

    demand: RewardDemand = field(default_factory=RewardDemand)
    """Without what only the client of a reward measures."""
    ends: tuple[float, ...] = ()
    """Ascending seconds from the start at which samples of the previous collection ended; empty: unknown."""
    group_size: int = 1
    group_ends: tuple[float, ...] = ()
    """The same for the last samples of the groups."""

    def in_groups(self) -> ScoreForecast:
        """Return the forecast for a reward that scores groups: it counts groups, which end with their last samples."""
        size, demand = self.group_size, self.demand
        counts = {"samples": -(-demand.samples // size), "expected": -(-demand.expected // size)}
        return ScoreForecast(demand.model_copy(update=counts), self.group_ends)

    def plus(self, num_samples: int, num_unscored: int) -> ScoreForecast:
        """Return the forecast with the samples of another lane, which runs at the same time."""
        demand = self.demand
        counts = {"samples": demand.samples + num_samples, "expected": demand.expected + num_unscored}
        return replace(self, demand=demand.model_copy(update=counts))

    def window_seconds(self, latency_seconds: float | None) -> float | None:
        due_seconds = self.demand.due_seconds
        if due_seconds is None or not self.ends:
            return due_seconds
        return measure_window(self.ends, due_seconds, latency_seconds or 0.0)

    def demand_on(self, load: ServiceLoad) -> RewardDemand:
        """Return the demand on a reward whose executions score what the forecast counts."""
        measured = {
            "window_seconds": self.window_seconds(load.latency_seconds),
            "latency_seconds": load.latency_seconds,
            **_describe_load(load),
        }
        return self.demand.model_copy(update=measured)


def measure_window(ends: Sequence[float], due_seconds: float, latency_seconds: float) -> float:
    """Return the target time of Little's law for samples that arrive unevenly.

    The samples after each end must be scored until `due_seconds`, or within one latency if that is later. The busiest
    such remainder sets the pace for all.
    """
    n = len(ends)
    whole = max(due_seconds - ends[0], latency_seconds)
    rests = (n * max(due_seconds - end, latency_seconds) / (n - i) for i, end in enumerate(ends[:-1], start=1))
    return min(whole, *rests) if n > 1 else whole


@dataclass(frozen=True)
class OpenEpisodes:
    """What the lanes do now."""

    train: CollectionProgress | None = None
    """None: all episodes of the step have ended, or there is no step."""
    eval: CollectionProgress | None = None
    at_once: int | None = None
    """Episodes of training that the schedule wants in flight at once. None: not known yet."""
    is_last: bool = False
    """Whether no further episode of training starts."""


@dataclass(frozen=True)
class EpisodeForecast:
    """The episodes of the current collection, or of the next one."""

    demand: RewardDemand
    """In episodes, without what depends on the service."""
    at_once: int
    """Episodes in flight at once."""
    lane: Lane = "train"


@dataclass(frozen=True)
class _Profile:
    """Profile of one service, in the last step."""

    calls_per_episode: float
    wait_seconds: float
    """Mean per episode."""


class _Pause:
    """The time from the end of a step's work for a service to the begin of the next step."""

    def __init__(self) -> None:
        self._ended_at: float | None = None
        self._seconds: float | None = None

    def record_begin(self, now: float) -> None:
        if self._ended_at is not None:
            self._seconds = max(0.0, now - self._ended_at)

    def record_end(self, at: float | None) -> None:
        """`at`: None: the next step starts as soon as possible, so the gap is not a pause."""
        self._ended_at = at

    def predict_start(self, demand: RewardDemand, now: float) -> None:
        """Set in how many seconds the next step begins, if that is known."""
        if self._seconds is not None and self._ended_at is not None:
            demand.starts_in_seconds = max(0.0, self._seconds - (now - self._ended_at))


class Forecaster:
    def __init__(
        self, samples_per_step: int, group_size: int = 1, *, steps_at_once: int = 1, streams: bool = False
    ) -> None:
        """`steps_at_once`: steps whose episodes are in flight together. `streams`: each group trains once it is scored,
        also during generation. Otherwise the updates begin when all groups are scored."""
        self._samples_per_step, self._group_size = samples_per_step, group_size
        self._steps_at_once, self._streams = steps_at_once, streams
        self._scores: dict[Lane, ScoreForecast] = {}
        """Forecast of the last collection: the times alone."""
        self._play_seconds: float | None = None
        """Time in which the episodes of the last step were played."""
        self._profiles: dict[str, _Profile] = {}
        self._totals_at_start: Mapping[str, CallTotals] = {}
        """Totals of training, when the step began."""
        self._after_scores, self._after_episodes = _Pause(), _Pause()

    @classmethod
    def of(cls, schedule: Schedule, group_size: int, *, needs_whole_step: bool) -> Forecaster:
        """`needs_whole_step`: whether the algorithm takes all groups of a step at once."""
        return cls(
            schedule.prompts_per_step * group_size,
            group_size,
            steps_at_once=max(1, min(1 + schedule.staleness, schedule.steps)),
            streams=schedule.type != "synchronous" and not needs_whole_step,
        )

    def record_begin(self, now: float, loads: Mapping[str, ServiceLoad] | None = None) -> None:
        """Record the begin of a step. `loads`: of the agent's services."""
        self._totals_at_start = {name: load.total("train") for name, load in (loads or {}).items()}
        self._after_scores.record_begin(now)
        self._after_episodes.record_begin(now)

    def record_interruption(self) -> None:
        """Record that the trainers died. The next step starts as soon as possible; the gap is not a pause."""
        self._after_scores.record_end(None)
        self._after_episodes.record_end(None)

    def record_end(
        self,
        progress: CollectionProgress,
        update_seconds: float,
        pipeline_seconds: float | None = None,
        loads: Mapping[str, ServiceLoad] | None = None,
    ) -> None:
        """Record a collection with its updates: the last scores are due when the GPUs have nothing else to do.

        `pipeline_seconds`: for a schedule that scores the episodes of later steps during this one, the work of the
        busier of trainer and rollouts: a step cannot be shorter, and scores must keep up with it. `loads`: of the
        agent's services.
        """
        if not progress.ended_at:
            return
        self._scores[progress.lane] = self._measure_scores(progress, update_seconds, pipeline_seconds)
        self._play_seconds = progress.generate_seconds if pipeline_seconds is None else pipeline_seconds
        for name, load in (loads or {}).items():
            done = load.total("train").since(self._totals_at_start.get(name, CallTotals()))
            num_episodes = progress.num_generated
            self._profiles[name] = _Profile(done.num_calls / num_episodes, done.wait_seconds / num_episodes)
        self._after_scores.record_end(progress.scored_at)
        self._after_episodes.record_end(progress.ended_at[-1])

    def _measure_scores(
        self, progress: CollectionProgress, update_seconds: float, pipeline_seconds: float | None
    ) -> ScoreForecast:
        last_by_group = {episode.group: episode.ended_at for episode in progress.episodes}
        due_seconds = progress.generate_seconds
        if pipeline_seconds is not None:
            due_seconds = pipeline_seconds
        elif self._streams and progress.lane == "train" and last_by_group:
            # The trainer begins with the first whole group, and only the last one trains after the last score.
            first_seconds = min(last_by_group.values()) - progress.started_at
            early_seconds = update_seconds * (1 - 1 / len(last_by_group))
            due_seconds = max(progress.generate_seconds, first_seconds + early_seconds)
        return ScoreForecast(
            RewardDemand(due_seconds=due_seconds),
            ends=_subsample([end - progress.started_at for end in progress.ended_at]),
            group_ends=_subsample(sorted(end - progress.started_at for end in last_by_group.values())),
        )

    def predict_scores(
        self, progress: CollectionProgress, now: float, *, is_open: bool, is_last: bool
    ) -> ScoreForecast:
        """Return the forecast for rewards. `is_open`: `progress` is of the current collection. `is_last`: none follows
        it."""
        lane: Lane = progress.lane if is_open else "train"
        measured = self._scores.get(lane, ScoreForecast())
        # After the last collection these still describe it: the next job starts with them.
        demand = RewardDemand(is_first=lane not in self._scores, due_seconds=measured.demand.due_seconds)
        if is_open:
            demand.samples, demand.is_open = progress.num_samples, True
            demand.expected = progress.num_unscored
            demand.elapsed_seconds = now - progress.started_at
            demand.due_seconds = demand.due_seconds or _predict_due(progress, demand.elapsed_seconds)
        elif not is_last:
            demand.samples = demand.expected = self._samples_per_step
            self._after_scores.predict_start(demand, now)
        return replace(measured, demand=demand, group_size=progress.group_size if is_open else self._group_size)

    def predict_episodes(self, episodes: OpenEpisodes, now: float) -> EpisodeForecast:
        """Return the forecast of the episodes that are open, else of those of the next step."""
        progress = episodes.train or episodes.eval
        demand = RewardDemand(is_first=self._play_seconds is None, due_seconds=self._play_seconds)
        at_once = self._samples_per_step * self._steps_at_once if episodes.at_once is None else episodes.at_once
        if progress is None:
            if episodes.is_last:
                return EpisodeForecast(demand, 0)
            demand.samples = demand.expected = self._samples_per_step
            self._after_episodes.predict_start(demand, now)
            return EpisodeForecast(demand, at_once)
        lanes = [lane for lane in (episodes.train, episodes.eval) if lane is not None]
        demand.is_open, demand.elapsed_seconds = True, now - progress.started_at
        demand.samples = sum(lane.num_samples for lane in lanes)
        demand.expected = sum(max(0, lane.num_samples - lane.num_generated) for lane in lanes)
        held_out = episodes.eval.num_samples if episodes.eval else 0
        return EpisodeForecast(demand, held_out + (at_once if episodes.train else 0), progress.lane)

    def demand_on(self, name: str, load: ServiceLoad, forecast: EpisodeForecast) -> RewardDemand:
        """Return the demand on one service of the agent."""
        demand = forecast.demand
        measured = {**_describe_load(load), "is_open": demand.is_open or load.in_flight > 0}
        if load.holds_slots:
            measured |= {
                "holds_slots": True,
                "samples": max(forecast.at_once, load.in_flight),
                "expected": max(demand.expected, load.in_flight),
                "latency_seconds": load.latency_seconds,
                "window_seconds": load.latency_seconds,
            }
            return demand.model_copy(update=measured)
        busy, window = self._predict_calls(forecast, name, load)
        measured |= {
            "samples": max(demand.samples, load.in_flight),
            # An episode that waits for its completion needs no slot, however late the step is.
            "expected": load.in_flight,
            "latency_seconds": busy,
            "window_seconds": window,
        }
        return demand.model_copy(update=measured)

    def _predict_calls(
        self, forecast: EpisodeForecast, name: str, load: ServiceLoad
    ) -> tuple[float | None, float | None]:
        """Return the seconds of the calls of one episode, and the seconds in which all episodes are played if no call
        waits: time that calls spent waiting is not time that there is. None: not measured yet."""
        demand, profile = forecast.demand, self._profiles.get(name)
        if profile is not None and self._play_seconds is not None:
            # Episodes of several steps wait at the same time.
            overlap = max(1.0, forecast.at_once / max(1, demand.samples))
            window = max(0.0, self._play_seconds - profile.wait_seconds / overlap)
            return profile.calls_per_episode * (load.latency_seconds or 0.0), window
        at_start = self._totals_at_start.get(name, CallTotals()) if forecast.lane == "train" else CallTotals()
        done = load.total(forecast.lane).since(at_start)
        if not demand.is_open or not done.num_calls or not demand.samples:
            return None, None
        # The pace so far: as many calls per second, if none of them waits.
        window = max(0.0, demand.elapsed_seconds - done.wait_seconds / demand.samples)
        return done.busy_seconds / demand.samples, window


def _describe_load(load: ServiceLoad) -> dict[str, float | None]:
    return {
        "in_flight": load.in_flight,
        "waiting": load.waiting,
        "oldest_in_flight_seconds": load.oldest_in_flight_seconds,
        "latency_p95_seconds": load.latency_p95_seconds,
    }


def _predict_due(progress: CollectionProgress, elapsed: float) -> float | None:
    """Predict when scores of the first collection are due: at the end of generation, as updates are unknown."""
    if progress.num_samples and progress.num_generated == progress.num_samples:
        return progress.generate_seconds
    share = progress.num_generated / progress.num_samples if progress.num_samples else 0.0
    return elapsed / share if share >= _MIN_GENERATED_SHARE else None


def _subsample(ends: Sequence[float]) -> tuple[float, ...]:
    return tuple(ends[:: -(-len(ends) // _MAX_ENDS) or 1])
