"""Counters and histograms of the hot path: plain numbers, which become Prometheus samples at a scrape.

prometheus_client takes a lock and several calls per observation, because any thread may count. Here only the event loop
counts, and a request has seven observations.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


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


class HistogramVector(Collector):
    """One histogram per combination of labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = bounds
        self._histograms: dict[tuple[str, ...], Histogram] = {}

    def labels(self, *values: str) -> Histogram:
        return self._histograms.setdefault(values, Histogram(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, histogram in self._histograms.items():
            family.add_metric(values, *histogram.read())
        yield family


class CounterVector(Collector):
    """One counter per value of the last label."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], fixed: Iterable[str]) -> None:
        """`fixed`: the values of all labels except the last."""
        self._name = name
        self._text = text
        self._labels = labels
        self._fixed = tuple(fixed)
        self._counts: dict[object, int] = {}

    def increment(self, value: object) -> None:
        self._counts[value] = self._counts.get(value, 0) + 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for value, count in self._counts.items():
            family.add_metric((*self._fixed, str(value)), count)
        yield family
