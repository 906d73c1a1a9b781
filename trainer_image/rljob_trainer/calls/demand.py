"""Predicts the demand of the next collection on the services of an agent: the driver's half of their autoscaling. Pure.

    runner         an episode holds a slot from its start to its end: slots = episodes in flight at once
    user, tools    slots = episodes x seconds of their calls / time in which the step's episodes are played

A client measures its calls (`ServiceLoad`); the operator computes replicas. Callers pass times. Invariant: the demand
is never 0 while a call waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.schedule import Schedule
from rljob_api.wire.protocol import Lane, RewardDemand
from rljob_trainer.episodes.progress import CollectionProgress


@dataclass(frozen=True)
class CallTotals:
    """Of one lane, since the driver started."""

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
    """What the client of a service has measured."""

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
    """The current collection, or the next one."""

    demand: RewardDemand
    """In episodes, without what depends on the service."""
    at_once: int
    """Episodes in flight at once."""
    lane: Lane = "train"


@dataclass(frozen=True)
class _Profile:
    """Of one service, in the last step."""

    calls_per_episode: float
    wait_seconds: float
    """Mean per episode."""


class AgentForecaster:
    def __init__(self, samples_per_step: int, schedule: Schedule) -> None:
        self._samples_per_step = samples_per_step
        self._steps_at_once = max(1, min(1 + schedule.staleness, schedule.steps))
        """Steps whose episodes are in flight together."""
        self._profiles: dict[str, _Profile] = {}
        self._play_seconds: float | None = None
        """Time in which the episodes of the last step were played."""
        self._totals_at_start: Mapping[str, CallTotals] = {}
        """Of training, when the step began."""
        self._ended_at: float | None = None
        """End of the last episode of the last step."""
        self._pause_seconds: float | None = None

    @classmethod
    def of(cls, spec: RLJobSpec) -> AgentForecaster:
        return cls(spec.schedule.prompts_per_step * spec.algorithm.group_size, spec.schedule)

    def record_begin(self, loads: Mapping[str, ServiceLoad], now: float) -> None:
        """Record the begin of a step."""
        self._totals_at_start = {name: load.total("train") for name, load in loads.items()}
        if self._ended_at is not None:
            self._pause_seconds = max(0.0, now - self._ended_at)

    def record_interruption(self) -> None:
        """Record that the trainers died. The next step starts as soon as possible; the gap is not a pause."""
        self._ended_at = None

    def record_end(
        self, progress: CollectionProgress, loads: Mapping[str, ServiceLoad], pipeline_seconds: float | None = None
    ) -> None:
        """Record a step. `pipeline_seconds`: as for `DemandForecaster.record_end`."""
        if not progress.ended_at:
            return
        self._play_seconds = progress.generate_seconds if pipeline_seconds is None else pipeline_seconds
        self._ended_at = progress.ended_at[-1]
        for name, load in loads.items():
            done = load.total("train").since(self._totals_at_start.get(name, CallTotals()))
            num_episodes = progress.num_generated
            self._profiles[name] = _Profile(done.num_calls / num_episodes, done.wait_seconds / num_episodes)

    def predict(self, episodes: OpenEpisodes, now: float) -> EpisodeForecast:
        """Return the forecast of the episodes that are open, else of those of the next step."""
        progress = episodes.train or episodes.eval
        demand = RewardDemand(is_first=self._play_seconds is None, due_seconds=self._play_seconds)
        at_once = self._samples_per_step * self._steps_at_once if episodes.at_once is None else episodes.at_once
        if progress is None:
            if episodes.is_last:
                return EpisodeForecast(demand, 0)
            demand.samples = demand.expected = self._samples_per_step
            if self._pause_seconds is not None and self._ended_at is not None:
                demand.starts_in_seconds = max(0.0, self._pause_seconds - (now - self._ended_at))
            return EpisodeForecast(demand, at_once)
        lanes = [lane for lane in (episodes.train, episodes.eval) if lane is not None]
        demand.is_open, demand.elapsed_seconds = True, now - progress.started_at
        demand.samples = sum(lane.num_samples for lane in lanes)
        demand.expected = sum(max(0, lane.num_samples - lane.num_generated) for lane in lanes)
        held_out = episodes.eval.num_samples if episodes.eval else 0
        return EpisodeForecast(demand, held_out + (at_once if episodes.train else 0), progress.lane)

    def demands(self, forecast: EpisodeForecast, loads: Mapping[str, ServiceLoad]) -> dict[str, RewardDemand]:
        """Return the demand by service."""
        return {name: self._demand(forecast, name, load) for name, load in loads.items()}

    def _demand(self, forecast: EpisodeForecast, name: str, load: ServiceLoad) -> RewardDemand:
        demand = forecast.demand
        measured = {
            "in_flight": load.in_flight,
            "waiting": load.waiting,
            "oldest_in_flight_seconds": load.oldest_in_flight_seconds,
            "latency_p95_seconds": load.latency_p95_seconds,
            "is_open": demand.is_open or load.in_flight > 0,
        }
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
