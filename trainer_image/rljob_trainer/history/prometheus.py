"""The driver's Prometheus metrics: what a step did, what the rewards returned, and what they are doing now."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rljob_api.wire.protocol import InvalidReason, Lane
from rljob_trainer.episodes.types import Episode, ScoredResult

log = logging.getLogger(__name__)

LATENCY_BUCKETS_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""The chart's values.schema.json lists them: an alert's latency must be one of the buckets."""
SCORE_BUCKETS = (
    *(-10, -5, -2, -1, -0.75, -0.5, -0.25, -0.1, -0.001, 0, 0.1, 0.25, 0.5, 0.75, 0.9),
    *(0.999, 1, 2, 5, 10),  # most rewards return 0 and 1: each has a (nearly) separate bucket
)
SCORE = "score"
VALID = "valid"
PHASES = ("starting", "generate", "score", "update", "publish", "sync", "evaluate", "checkpoint")
_MAX_COMPONENTS = 32
"""Per reward."""
_MAX_GAUGES = 256
"""Per part of a step's or an evaluation's record, such as its components."""
_REWARD_GAUGES = {
    "in_flight": "Samples that wait for this reward.",
    "waiting": "Requests that wait for a free replica.",
    "waiting_oldest_seconds": "Age of the oldest waiting request.",
    "replicas": "Ready replicas that were found.",
}
_REWARD_COUNTERS = {
    "hedges": "Hedged requests for slow samples.",
    "hedge_wins": "Hedged requests whose result counted.",
    "rescored": "Samples rescored because the reward's version changed.",
}


class RewardStatistics(Protocol):
    @property
    def num_requests(self) -> Mapping[Lane, int]: ...
    def statistics(self) -> Mapping[str, float]: ...


class PrometheusMetrics:
    """The driver's /metrics. Gauges hold the last step's numbers. Counters and histograms also move during a step."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._known: defaultdict[str, set[str]] = defaultdict(set)
        by_component = ["reward", "lane", "component"]
        self._latency = Histogram(
            "rljob_reward_latency_seconds", "From an episode's end to this reward's result, with waits and retries.",
            ["reward", "lane", "outcome"], registry=registry, buckets=LATENCY_BUCKETS_SECONDS,
        )  # fmt: skip
        self._score = Histogram(
            "rljob_reward_score", "Valid scores (component: score) and what else the reward returned.",
            by_component, registry=registry, buckets=SCORE_BUCKETS,
        )  # fmt: skip
        # A histogram with bounds below 0 has no sum, and a counter cannot fall: a gauge, for delta().
        self._score_sum = Gauge(
            "rljob_reward_score_accumulated", "Sum of what rljob_reward_score counts.", by_component, registry=registry
        )

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        text = "Samples without a valid score, after the last attempt."
        self._invalid = counter("rljob_reward_invalid", text, "reward", "lane", "reason")
        self._samples = counter("rljob_samples", "Samples scored.", "lane")
        self._tokens = counter("rljob_sampled_tokens", "Tokens sampled.", "lane")
        self.phases = counter("rljob_phase_seconds", "The driver's time; of a step, known at its end.", "phase")
        text = "Trained tokens, by the steps between the weights that sampled them and their training."
        self._trained_tokens = counter("rljob_trained_tokens", text, "staleness")
        text = "Time in which each role worked, known at the end of a step. Roles overlap."
        self._busy = counter("rljob_busy_seconds", text, "role")
        self._skipped = counter("rljob_skipped_updates", "Updates left out, because a number was not finite.")
        text = "Groups replaced by those of other prompts, because their scores were equal."
        self._replaced = counter("rljob_replaced_groups", text)
        self.mismatches = counter("rljob_weight_mismatches", "Rollouts that served weights with a wrong digest.")
        self.restarts = counter("rljob_restarts", "Restarts by the driver.", "role")
        for phase in PHASES:
            self.phases.labels(phase)

    def register_rewards(self, clients: Mapping[str, RewardStatistics]) -> None:
        """Export all rewards, whose clients a scrape reads. Counters start at 0: rate() shows their first event."""
        for name in clients:
            for lane in get_args(Lane):
                self._latency.labels(name, lane, VALID)
                for reason in InvalidReason:
                    self._invalid.labels(name, lane, reason.value)
        self.registry.register(_RewardCollector(clients))

    def record_scored(self, lane: Lane, episode: Episode) -> None:
        self._samples.labels(lane).inc()
        self._tokens.labels(lane).inc(episode.num_sampled)
        for name, result in episode.results.items():
            if isinstance(result, ScoredResult):
                outcome = VALID if result.reason is None else result.reason.value
                self._latency.labels(name, lane, outcome).observe(result.latency_seconds)
            if result.reason is not None:
                self._invalid.labels(name, lane, result.reason.value).inc()
            elif result.score is not None:
                self._record_value(name, lane, SCORE, result.score)
                for component, value in result.components.items():
                    if self._has_room(f"reward {name}", component, _MAX_COMPONENTS):
                        self._record_value(name, lane, component, value)

    def _record_value(self, reward: str, lane: Lane, component: str, value: float) -> None:
        self._score.labels(reward, lane, component).observe(value)
        self._score_sum.labels(reward, lane, component).inc(value)

    def _has_room(self, part: str, series: str, limit: int) -> bool:
        """Return whether `part` exports a series. User code may return ever new components, and each stays a series."""
        known = self._known[part]
        if series not in known and len(known) < limit:
            known.add(series)
            if len(known) == limit:
                log.warning("%s: /metrics exports only its first %d components", part, limit)
        return series in known

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        """Set the gauges, and count what a step did."""
        if kind == "step":
            self._count_step(numbers)
        for name, value in {**numbers, "number": step}.items():
            metric = f"rljob_{kind}_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            if self._has_room(f"{kind}/{name.partition('/')[0]}", metric, _MAX_GAUGES):
                if metric not in self._gauges:
                    self._gauges[metric] = Gauge(metric, f"{name} of the last {kind}", registry=self.registry)
                self._gauges[metric].set(value)

    def _count_step(self, numbers: dict[str, float]) -> None:
        seconds = numbers.get("step_seconds", 0.0)
        for name, value in numbers.items():
            part, _, key = name.partition("/")
            if part == "staleness_histogram":
                self._trained_tokens.labels(key).inc(value)
            elif part == "busy_shares":
                self._busy.labels(key).inc(value * seconds)
        self._skipped.inc(numbers.get("num_skipped_updates", 0.0))
        self._replaced.inc(numbers.get("num_replaced_groups", 0.0))

    def close(self) -> None:
        """Do nothing: scrapers pull."""

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _RewardCollector(Collector):
    def __init__(self, clients: Mapping[str, RewardStatistics]) -> None:
        self._clients = clients

    def describe(self) -> list[Metric]:
        return []  # so that registering does not collect

    def collect(self) -> Iterator[Metric]:
        statistics = {name: client.statistics() for name, client in self._clients.items()}
        for family, texts in ((GaugeMetricFamily, _REWARD_GAUGES), (CounterMetricFamily, _REWARD_COUNTERS)):
            for metric_name, text in texts.items():
                metric = family(f"rljob_reward_{metric_name}", text, labels=["reward"])
                for name, values in statistics.items():
                    metric.add_metric([name], values[metric_name])
                yield metric
        text = "Requests for scores, one per sample or group."
        attempts = CounterMetricFamily("rljob_reward_attempts", text, labels=["reward", "lane"])
        for name, client in self._clients.items():
            for lane in get_args(Lane):
                attempts.add_metric([name, lane], client.num_requests[lane])
        yield attempts
