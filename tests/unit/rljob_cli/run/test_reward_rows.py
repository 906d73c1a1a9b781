"""Rewards as rows: each number from its source, and a dash if it is unknown."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from rljob_api.manifest.scaling import RewardScaling
from rljob_api.manifest.services.reward import Reward
from rljob_cli.run.reward_rows import (
    HEADER,
    RewardMetrics,
    RewardRow,
    build_row,
    format_short,
    parse_metrics,
    row_cells,
)
from rljob_cli.tables import build_table, to_text

FUNCTION = Reward.model_validate({"name": "correct", "slots": 8, "function": {"file": "r.py"}})
HTTP = Reward.model_validate({"name": "correct", "http": {"url": "http://r"}})

SERVER = """
rljob_reward_slots{reward="correct"} 8.0
rljob_reward_slots_in_use{lane="train",reward="correct"} 5.0
rljob_reward_slots_in_use{lane="eval",reward="correct"} 1.0
rljob_reward_queue_length{lane="train",reward="correct"} 3.0
rljob_reward_queue_oldest_seconds{lane="train",reward="correct"} 4.5
"""


def driver_metrics(seconds: list[float], invalid: dict[str, int], reward: str = "correct") -> str:
    registry = CollectorRegistry()
    labels = ["reward", "lane", "outcome"]
    latency = Histogram("rljob_reward_latency_seconds", "", labels, buckets=(1, 2, 4, 8), registry=registry)
    for number in seconds:
        latency.labels(reward, "train", "valid").observe(number)
    counter = Counter("rljob_reward_invalid", "", ["reward", "lane", "reason"], registry=registry)
    for reason, count in invalid.items():
        counter.labels(reward, "train", reason).inc(count)
    return generate_latest(registry).decode()


def waiting_at_driver(number: int, oldest_seconds: float, reward: str = "correct") -> str:
    name = f'{{reward="{reward}"}}'
    return f"rljob_reward_waiting{name} {number}\nrljob_reward_waiting_oldest_seconds{name} {oldest_seconds}\n"


def test_unknown_numbers_are_dashes_and_not_zero() -> None:
    row = build_row(RewardMetrics(), "correct", None)
    assert row == RewardRow("correct")
    assert row_cells(row) == ["correct", *["-"] * (len(HEADER) - 1)]
    assert set(asdict(row).values()) == {"correct", None}


def test_numbers_come_from_status_servers_and_driver() -> None:
    scaling = RewardScaling(name="correct", replicas=3, slots=20)
    metrics = RewardMetrics(
        driver=parse_metrics(
            driver_metrics([0.5, 1.5, 3.0, 3.0], {"timeout": 2, "exception": 5}) + waiting_at_driver(2, 9.0)
        ),
        servers={"correct": [parse_metrics(SERVER)] * 2},
    )
    row = build_row(metrics, "correct", FUNCTION, 2, 3, scaling)
    assert (row.kind, row.ready, row.replicas) == ("function", 2, 3)
    assert (row.slots_wanted, row.slots_given, row.slots_in_use) == (20, 16, 12)
    assert (row.waiting, row.oldest_seconds) == (8, 9.0), "requests that wait at the driver count, too"
    assert (row.latency_p50_seconds, row.latency_p95_seconds) == (2.0, pytest.approx(3.8))
    assert row.invalid == {"exception": 5, "timeout": 2}
    assert row_cells(row) == [
        *("correct", "function", "2/3", "20", "16", "12", "8", "9.0s", "2.0s", "3.8s", "5 exception, 2 timeout")
    ]


def test_row_of_an_agent_has_its_calls() -> None:
    driver = """
rljob_agent_call_seconds_bucket{lane="train",le="2.0",outcome="valid",service="runner"} 3.0
rljob_agent_call_seconds_bucket{lane="train",le="+Inf",outcome="valid",service="runner"} 3.0
rljob_agent_call_seconds_count{lane="train",outcome="valid",service="runner"} 3.0
rljob_agent_call_seconds_count{lane="train",outcome="timeout",service="runner"} 2.0
rljob_agent_waiting{service="runner"} 7.0
rljob_agent_waiting_oldest_seconds{service="runner"} 61.0
rljob_agent_waiting{service="user"} 100.0
"""
    scaling = RewardScaling(name="runner", replicas=4, slots=64)
    row = build_row(RewardMetrics(parse_metrics(driver)), "runner", FUNCTION, 0, 4, scaling, "runner")
    assert row_cells(row) == [*("runner", "runner", "0/4", "64", "0", "-", "7", "61s", "1.0s", "1.9s", "2 timeout")]


def test_sums_are_unknown_when_a_pod_does_not_answer() -> None:
    row = build_row(RewardMetrics(servers={"correct": None}), "correct", FUNCTION, 2, 2)
    assert (row.slots_in_use, row.waiting, row.oldest_seconds) == (None, None, None)
    assert row.slots_given == 16, "the job specifies the slots per replica"


def test_queue_at_the_driver_counts_without_a_server() -> None:
    text = waiting_at_driver(7, 61.0) + waiting_at_driver(1, 99.0, "other")
    row = build_row(RewardMetrics(parse_metrics(text)), "correct", FUNCTION, 0, 1)
    assert (row.slots_given, row.waiting, row.oldest_seconds) == (0, 7, 61.0)


def test_invalid_is_unknown_before_the_first_result_and_then_zero() -> None:
    before = parse_metrics(driver_metrics([], {"timeout": 0}))
    after = parse_metrics(driver_metrics([1.0], {"timeout": 0}))
    assert build_row(RewardMetrics(before), "correct", None).invalid is None
    assert build_row(RewardMetrics(after), "correct", None).invalid == {}
    assert row_cells(build_row(RewardMetrics(after), "correct", None))[-1] == "0"
    other = RewardMetrics(parse_metrics(driver_metrics([1.0], {"timeout": 1}, reward="other")))
    assert build_row(other, "correct", None).invalid is None


def test_external_endpoint_has_no_slots() -> None:
    row = build_row(RewardMetrics(), "correct", HTTP)
    assert (row.kind, row.slots_given) == ("http", None)


def test_latency_beyond_the_last_bucket_is_its_edge() -> None:
    metrics = RewardMetrics(parse_metrics(driver_metrics([100.0], {})))
    assert build_row(metrics, "correct", None).latency_p50_seconds == 8.0


def test_text_that_is_not_metrics_has_no_samples() -> None:
    assert parse_metrics("<html>busy</html>\n") == []


def test_typical_row_fits_80_columns() -> None:
    row = RewardRow("correct", "function", 12, 12, 320, 192, 192, 1024, 12.0, 0.8, 31.0, {"timeout": 3})
    [_, line] = to_text(build_table(HEADER, [row_cells(row)], gap=1)).splitlines()
    assert len(line) <= 80, line


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (0.0004, "1ms"),
        (0.0123, "12ms"),
        (0.25, "0.2s"),
        (9.96, "10s"),
        (599, "599s"),
        (600, "10m"),
        (7.2e4, "20h"),
    ],
)
def test_durations_have_at_most_five_characters(seconds: float, shown: str) -> None:
    assert format_short(seconds) == shown
