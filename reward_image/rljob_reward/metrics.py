"""Prometheus metrics of a reward server: queue and execution time by lane and outcome, slots, queues, refusals."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from rljob_api.protocol import Lane
from rljob_reward.lanes import LANES, Lanes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VALID = "valid"
_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """One registry a server, so that tests may hold several."""

    def __init__(self, reward: str, slots: int) -> None:
        self._reward = reward
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        by_outcome = ("reward", "lane", "outcome")
        self._queue = Histogram(
            "rljob_reward_queue_seconds",
            "From arrival to the start of execution.",
            by_outcome,
            buckets=_BUCKETS_SECONDS,
            registry=self._registry,
        )
        self._execute = Histogram(
            "rljob_reward_execute_seconds",
            "From the start of execution to its end.",
            by_outcome,
            buckets=_BUCKETS_SECONDS,
            registry=self._registry,
        )
        self._refused = Counter(
            "rljob_reward_refused", "Requests answered 429.", ("reward", "lane"), registry=self._registry
        )
        self._restarts = Counter(
            "rljob_reward_worker_restarts",
            "Workers that were replaced.",
            ("reward",),
            registry=self._registry,
        )
        self._restarts.labels(reward)
        for lane in LANES:
            self._refused.labels(reward, lane)
        self._gauge("rljob_reward_slots_total", "Requests that may execute at once.").labels(reward).set(slots)
        self._histograms: dict[tuple[Lane, str], tuple[Histogram, Histogram]] = {}

    @property
    def registry(self) -> CollectorRegistry:
        """For what a kind of reward has to tell besides."""
        return self._registry

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ("reward", *labels), registry=self._registry)

    def watch(self, lanes: Lanes) -> None:
        """Read slots in use and queues at each scrape."""
        in_use = self._gauge("rljob_reward_slots_in_use", "Requests that execute now.", "lane")
        waiting = self._gauge("rljob_reward_queue_length", "Requests that wait.", "lane")
        for lane in LANES:
            in_use.labels(self._reward, lane).set_function(partial(lanes.num_running_in, lane))
            waiting.labels(self._reward, lane).set_function(partial(lanes.num_waiting, lane))

    def record_result(self, lane: Lane, outcome: str, queue_seconds: float, execute_seconds: float) -> None:
        pair = self._histograms.get((lane, outcome))
        if pair is None:
            labels = (self._reward, lane, outcome)
            pair = self._histograms[lane, outcome] = (self._queue.labels(*labels), self._execute.labels(*labels))
        pair[0].observe(queue_seconds)
        pair[1].observe(execute_seconds)

    def record_refused(self, lane: Lane) -> None:
        self._refused.labels(self._reward, lane).inc()

    def record_restart(self) -> None:
        self._restarts.labels(self._reward).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
