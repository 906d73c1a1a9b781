"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, and Prometheus for scraping.

Each tracker takes the flat numbers of a step or evaluation. None may stop training: one that fails is logged and left
out from then on. Heavy clients are imported when a job asks for them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.protocol import InvalidReason, Lane
from rljob_trainer.episodes.types import Scored, Trajectory
from rljob_trainer.rewards.clients import Rewards

log = logging.getLogger(__name__)

LATENCY_BUCKETS_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""The chart's values.schema.json lists them: an alert's latency must be one."""
SCORE_BUCKETS = (
    *(-10, -5, -2, -1, -0.75, -0.5, -0.25, -0.1, -0.001, 0, 0.1, 0.25, 0.5, 0.75, 0.9),
    *(0.999, 1, 2, 5, 10),  # 0 and 1 are what most rewards say: each has a bucket of (nearly) its own
)
SCORE = "score"
VALID = "valid"
PHASES = ("starting", "generate", "score", "update", "publish", "sync", "evaluate", "checkpoint")
_MAX_COMPONENTS = 32
"""Of one reward."""
_MAX_GAUGES = 256
"""Of one part of a step's or an evaluation's record, such as its components."""


class Tracker(Protocol):
    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        """Take the numbers of one step or evaluation (`kind`)."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files through tensorboard's own writer: torch's would import all of torch into the driver."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def restart_at(self, step: int) -> None:
        """Tell TensorBoard that the history is cut: it drops what it read of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        step += step > 0  # it drops the step that it is told as well, and that one is done; of step 0 nothing is
        self._writer.add_event(Event(wall_time=time.time(), step=step, file_version="brain.Event:2"))
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run a job; a resumed job goes on in it."""

    def __init__(self, project: str, job: RLJob) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "spec.tracking.wandbProject is set, but wandb is not installed: rljob-trainer[wandb]"
            ) from error
        name = f"{job.metadata.namespace}-{job.metadata.name}"
        run_id = job.metadata.uid or name
        self._run: Any = wandb.init(
            project=project, name=job.metadata.name, id=run_id, resume="allow", config=job.to_manifest()["spec"]
        )

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()} | {"step": step})

    def close(self) -> None:
        self._run.finish()


class MlFlow:
    """One run for each start of the driver: MLflow alone says under which id a run goes on."""

    def __init__(self, experiment: str, job: RLJob) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise UserError(
                "spec.tracking.mlflowExperiment is set, but mlflow is not installed: rljob-trainer[mlflow]"
            ) from error
        self._mlflow: Any = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=job.metadata.name)

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._mlflow.log_metrics({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Prometheus:
    """The driver's /metrics. Gauges hold the last step's numbers; what accumulates is a counter or a histogram, and
    moves while a step is under way."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._num_gauges: dict[str, int] = {}
        self._components: dict[str, set[str]] = {}
        self._latency = Histogram(
            "rljob_reward_latency_seconds",
            "From a trajectory's end to this reward's result, waits and retries included.",
            ["reward", "lane", "outcome"],
            registry=registry,
            buckets=LATENCY_BUCKETS_SECONDS,
        )
        self._score = Histogram(
            "rljob_reward_score",
            "Valid scores (component: score) and what else the reward returned.",
            ["reward", "lane", "component"],
            registry=registry,
            buckets=SCORE_BUCKETS,
        )
        # A histogram with bounds below 0 has no sum, and a counter cannot fall: a gauge, for delta().
        self._score_sum = Gauge(
            "rljob_reward_score_accumulated",
            "Sum of what rljob_reward_score counts.",
            ["reward", "lane", "component"],
            registry=registry,
        )
        self._invalid = Counter(
            "rljob_reward_invalid",
            "Samples without a valid score, after the last attempt.",
            ["reward", "lane", "reason"],
            registry=registry,
        )
        self._samples = Counter("rljob_samples", "Samples scored.", ["lane"], registry=registry)
        self._tokens = Counter("rljob_sampled_tokens", "Tokens sampled.", ["lane"], registry=registry)
        self._phases = Counter(
            "rljob_phase_seconds", "Where the driver's time went; of a step, known at its end.", ["phase"],
            registry=registry,
        )  # fmt: skip
        self._mismatches = Counter(
            "rljob_weight_mismatches", "Rollouts that served weights with a wrong digest.", registry=registry
        )
        self._restarts = Counter("rljob_restarts", "Restarts by the driver.", ["role"], registry=registry)
        for phase in PHASES:
            self._phases.labels(phase)

    def watch(self, rewards: Rewards) -> None:
        """Begin all of the rewards' counters at 0, since what appears with its first event has no rate; and read at
        each scrape what is under way."""
        for name in rewards.clients:
            for lane in get_args(Lane):
                self._latency.labels(name, lane, VALID)
                for reason in InvalidReason:
                    self._invalid.labels(name, lane, reason.value)
        self.registry.register(_Underway(rewards))

    def record_scored(self, lane: Lane, trajectory: Trajectory) -> None:
        """A sample's last reward is there."""
        self._samples.labels(lane).inc()
        self._tokens.labels(lane).inc(trajectory.num_sampled)
        for name, result in trajectory.results.items():
            if isinstance(result, Scored):
                outcome = VALID if result.reason is None else result.reason.value
                self._latency.labels(name, lane, outcome).observe(result.latency_seconds)
            if result.reason is not None:
                self._invalid.labels(name, lane, result.reason.value).inc()
            elif result.score is not None:
                self._record_value(name, lane, SCORE, result.score)
                for component, value in result.components.items():
                    if self._has_room(name, component):
                        self._record_value(name, lane, component, value)

    def _record_value(self, reward: str, lane: Lane, component: str, value: float) -> None:
        self._score.labels(reward, lane, component).observe(value)
        self._score_sum.labels(reward, lane, component).inc(value)

    def _has_room(self, reward: str, component: str) -> bool:
        """Whether a component gets a histogram: user code may return ever new keys, and each is a series for good."""
        known = self._components.setdefault(reward, set())
        if component not in known and len(known) < _MAX_COMPONENTS:
            known.add(component)
            if len(known) == _MAX_COMPONENTS:
                log.warning("reward %s: /metrics has its first %d components and no more", reward, _MAX_COMPONENTS)
        return component in known

    def record_phase(self, phase: str, seconds: float) -> None:
        self._phases.labels(phase).inc(seconds)

    def record_mismatch(self) -> None:
        self._mismatches.inc()

    def record_restart(self, role: str) -> None:
        self._restarts.labels(role).inc()

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        for name, value in {**numbers, "number": step}.items():
            metric = f"rljob_{kind}_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            if metric not in self._gauges:
                part = f"{kind}/{name.partition('/')[0]}"
                if self._num_gauges.get(part, 0) == _MAX_GAUGES:
                    continue
                self._num_gauges[part] = self._num_gauges.get(part, 0) + 1
                self._gauges[metric] = Gauge(metric, f"{name} of the last {kind}", registry=self.registry)
            self._gauges[metric].set(value)

    def close(self) -> None:
        """Nothing to end: scrapers come to us."""

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Underway(Collector):
    """What a scrape reads of the reward clients."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    def describe(self) -> list[Metric]:
        return []  # so that registering does not collect

    def collect(self) -> Iterator[Metric]:
        of = ["reward"]
        in_flight = GaugeMetricFamily("rljob_reward_in_flight", "Samples that wait for this reward.", labels=of)
        waiting = GaugeMetricFamily(
            "rljob_reward_waiting", "Requests for which no replica is there or free.", labels=of
        )
        oldest = GaugeMetricFamily(
            "rljob_reward_waiting_oldest_seconds", "For how long the oldest of them waits.", labels=of
        )
        replicas = GaugeMetricFamily("rljob_reward_replicas", "Ready replicas that were found.", labels=of)
        attempts = CounterMetricFamily(
            "rljob_reward_attempts", "Requests made for scores, one a sample or one a group.", labels=["reward", "lane"]
        )
        hedges = CounterMetricFamily("rljob_reward_hedges", "Second requests for slow samples.", labels=of)
        wins = CounterMetricFamily("rljob_reward_hedge_wins", "Second requests whose result counted.", labels=of)
        rescored = CounterMetricFamily(
            "rljob_reward_rescored", "Samples scored again, as the reward's version changed in the step.", labels=of
        )
        for name, client in self._rewards.clients.items():
            in_flight.add_metric([name], client.num_samples_in_flight)
            waiting.add_metric([name], client.num_waiting)
            oldest.add_metric([name], client.oldest_waiting_seconds)
            replicas.add_metric([name], len(client.replicas.fleet.replicas))
            for lane in get_args(Lane):
                attempts.add_metric([name, lane], client.num_requests[lane])
            hedges.add_metric([name], client.hedges.num_hedges if client.hedges else 0)
            wins.add_metric([name], client.hedges.num_wins if client.hedges else 0)
            rescored.add_metric([name], client.num_rescored)
        yield from (in_flight, waiting, oldest, replicas, attempts, hedges, wins, rescored)


class Trackers:
    """All trackers of a job."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._tell(lambda tracker: tracker.log(kind, step, numbers))

    def restart_at(self, step: int) -> None:
        """The history is cut back to `step`."""
        self._tell(lambda tracker: tracker.restart_at(step) if isinstance(tracker, TensorBoard) else None)

    def close(self) -> None:
        self._tell(lambda tracker: tracker.close())

    def _tell(self, tell: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                tell(tracker)
            except Exception:  # somebody's server is down: not a reason to lose a training run
                log.exception("%s failed and is left out from now on", type(tracker).__name__)
                self._trackers.remove(tracker)


def build_trackers(job: RLJob, run_dir: Path, prometheus: Prometheus) -> Trackers:
    """The trackers that spec.tracking asks for. Raises UserError for one that is not installed."""
    tracking = job.spec.tracking
    trackers: list[Tracker] = [prometheus]
    if tracking.tensorboard:
        trackers.append(TensorBoard(run_dir / "tensorboard"))
    if tracking.wandb_project:
        trackers.append(WeightsAndBiases(tracking.wandb_project, job))
    if tracking.mlflow_experiment:
        trackers.append(MlFlow(tracking.mlflow_experiment, job))
    return Trackers(trackers)
