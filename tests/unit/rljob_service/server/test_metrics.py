"""Metrics of a reward server, rendered without a server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rljob_service.server.lanes import Lanes
from rljob_service.server.metrics import ServerMetrics


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
