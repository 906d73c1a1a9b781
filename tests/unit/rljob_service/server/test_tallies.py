"""Our counters and histograms render as those of prometheus_client."""

from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from rljob_service.server.tallies import CounterVector, HistogramVector

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
