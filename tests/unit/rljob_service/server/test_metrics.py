"""Metrics of a reward server, rendered without a server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from rljob_service.server.lanes import Lanes
from rljob_service.server.metrics import CounterVector, HistogramVector, ServerMetrics


@dataclass(eq=False)
class Request:
    arrived: float = field(default_factory=time.perf_counter)


def sample(metrics: ServerMetrics, line: str) -> float:
    """The value of the sample that begins with `line`."""
    [row] = [row for row in metrics.render().decode().splitlines() if row.startswith(line)]
    return float(row.rsplit(" ", 1)[1])


def test_queue_age_is_that_of_its_oldest_request() -> None:
    metrics, lanes = ServerMetrics("test", slots=1), Lanes[Request](slots=1, queue_length=9)
    metrics.watch(lanes)
    age = 'rljob_reward_queue_oldest_seconds{lane="train",reward="test"}'
    assert sample(metrics, age) == 0.0, "nothing waits"
    now = time.perf_counter()
    for seconds in (500, 300, 100):
        lanes.admit("train", Request(now - seconds))
    lanes.start_next()
    assert 300 <= sample(metrics, age) < 500, "what runs does not wait"
    assert sample(metrics, age.replace("train", "eval")) == 0.0


def test_expected_metrics_are_exported_as_zero_from_the_start() -> None:
    metrics = ServerMetrics("test", slots=1)
    assert sample(metrics, 'rljob_reward_execute_seconds_count{lane="eval",outcome="valid",reward="test"}') == 0


BOUNDS = (0.001, 0.5, 1, 2.5, 10)


def render(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 20))))
def test_histogram_equals_that_of_prometheus_client(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    vector = HistogramVector("x_seconds", "Text.", ("reward", "lane"), BOUNDS)
    ours.register(vector)
    histogram = prometheus_client.Histogram("x_seconds", "Text.", ("reward", "lane"), buckets=BOUNDS, registry=theirs)
    for value in values:
        vector.labels("r", "train").observe(value)
        histogram.labels("r", "train").observe(value)
    assert render(ours) == render(theirs) or not values


def test_counter_equals_that_of_prometheus_client() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    vector = CounterVector("x", "Text.", ("reward", "status"), ["r"])
    ours.register(vector)
    counter = prometheus_client.Counter("x", "Text.", ("reward", "status"), registry=theirs)
    for status in (200, 404, 200):
        vector.increment(status)
        counter.labels("r", str(status)).inc()
    assert render(ours) == render(theirs)
