"""Prometheus metrics of a server: queue and execution time by lane and outcome, slots, queues, refusals.

Counters and histograms of the hot path are plain numbers, which become Prometheus samples at a scrape:
prometheus_client takes a lock and several calls per observation, because any thread may count. Here only the event loop
counts, and a request has seven observations.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rljob_api.wire.base import Lane
from rljob_service.server.execution import Execution
from rljob_service.server.lanes import LANES, Lanes


class Histogram:
    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative buckets, and the sum."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))
        return buckets, self._sum


@dataclass(eq=False)
class HistogramVector(Collector):
    """One histogram per combination of labels."""

    _name: str
    _text: str
    _labels: tuple[str, ...]
    _bounds: tuple[float, ...]
    _histograms: dict[tuple[str, ...], Histogram] = field(default_factory=dict)

    def labels(self, *values: str) -> Histogram:
        return self._histograms.setdefault(values, Histogram(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, histogram in self._histograms.items():
            family.add_metric(values, *histogram.read())
        yield family


@dataclass(eq=False)
class CounterVector(Collector):
    """One counter per value of the last label."""

    _name: str
    _text: str
    _labels: tuple[str, ...]
    _fixed: Sequence[str]
    """The values of all labels except the last."""
    _counts: dict[object, int] = field(default_factory=dict)

    def increment(self, value: object) -> None:
        self._counts[value] = self._counts.get(value, 0) + 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for value, count in self._counts.items():
            family.add_metric((*self._fixed, str(value)), count)
        yield family


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VALID = "valid"
_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class ServerMetrics:
    def __init__(self, reward: str, slots: int) -> None:
        self.reward = reward
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._queue = self._histogram("rljob_reward_queue_seconds", "From arrival to the start of execution.")
        self._execute = self._histogram("rljob_reward_execute_seconds", "From the start of execution to its end.")
        self._refused = self._counter("rljob_reward_refused", "Requests answered 429.", "lane")
        responses = CounterVector(
            "rljob_reward_responses", "Responses of the server, by HTTP status.", ("reward", "status"), [reward]
        )
        self.registry.register(responses)
        self.record_response = responses.increment
        self._restarts = self._counter("rljob_reward_worker_restarts", "Workers that were replaced.")
        self._restarts.labels(reward)
        self._cache = self._counter(
            "rljob_reward_cache",
            "Requests of a reward with `cache`: hit (a cached result), joined (an equal request was pending), miss.",
            "outcome",
        )
        for lane in LANES:  # exported as 0 from the start, so that rate() sees the first event
            self._refused.labels(reward, lane)
            self._queue.labels(reward, lane, VALID)
            self._execute.labels(reward, lane, VALID)
        self._gauge("rljob_reward_slots", "Maximum number of concurrent executions.").labels(reward).set(slots)
        self._histograms: dict[tuple[Lane, str], tuple[Histogram, Histogram]] = {}

    def _histogram(self, name: str, text: str) -> HistogramVector:
        vector = HistogramVector(name, text, ("reward", "lane", "outcome"), _BUCKETS_SECONDS)
        self.registry.register(vector)
        return vector

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("reward", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ("reward", *labels), registry=self.registry)

    def watch(self, lanes: Lanes[Execution]) -> None:
        """Read slots in use and queues at each scrape."""
        in_use = self._gauge("rljob_reward_slots_in_use", "Requests that execute now.", "lane")
        waiting = self._gauge("rljob_reward_queue_length", "Requests that wait.", "lane")
        oldest = self._gauge("rljob_reward_queue_oldest_seconds", "Waiting time of the oldest request.", "lane")
        for lane in LANES:
            oldest.labels(self.reward, lane).set_function(partial(_age_of_oldest, lanes, lane))
            in_use.labels(self.reward, lane).set_function(partial(lanes.num_running_in, lane))
            waiting.labels(self.reward, lane).set_function(partial(lanes.num_waiting, lane))

    def record_result(self, lane: Lane, outcome: str, queue_seconds: float, execute_seconds: float) -> None:
        pair = self._histograms.get((lane, outcome))
        if pair is None:
            labels = (self.reward, lane, outcome)
            pair = self._histograms[lane, outcome] = (self._queue.labels(*labels), self._execute.labels(*labels))
        pair[0].observe(queue_seconds)
        pair[1].observe(execute_seconds)

    def record_refused(self, lane: Lane) -> None:
        self._refused.labels(self.reward, lane).inc()

    def record_cache(self, outcome: str) -> None:
        self._cache.labels(self.reward, outcome).inc()

    def record_restart(self) -> None:
        self._restarts.labels(self.reward).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


def _age_of_oldest(lanes: Lanes[Execution], lane: Lane) -> float:
    oldest = lanes.oldest_waiting(lane)
    return 0.0 if oldest is None else time.perf_counter() - oldest.arrived
