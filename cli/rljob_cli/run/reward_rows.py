"""Rewards as table rows, for every view of a job: replicas, load, latency and invalid results. Pure.

Built from the job, its status, and the /metrics of driver and reward servers. Leaves fetching to the views. Invariant:
an unknown number is None and shown as a dash, never as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from rljob_api.manifest.reward import RewardBase
from rljob_api.manifest.scaling import RewardScaling

HEADER = ("REWARD", "KIND", "READY", "WANT", "GIVEN", "USED", "QUEUE", "AGE", "P50", "P95", "INVALID")
"""WANT, GIVEN and USED are slots. QUEUE and AGE describe waiting requests. P50 and P95: from trajectory to score."""
UNKNOWN = "-"
_MAX_SECONDS_WITH_FRACTION = 9.95
_MIN_SECONDS_UNIT = 0.0995


@dataclass(frozen=True)
class RewardRow:
    """One reward. None: unknown. Field names are part of --output json."""

    name: str
    kind: str | None = None
    """function, model, judge, http."""
    ready: int | None = None
    replicas: int | None = None
    """Desired Pods."""
    slots_wanted: int | None = None
    """Demand at the autoscaler's last decision."""
    slots_given: int | None = None
    """Slots of the ready Pods."""
    slots_in_use: int | None = None
    waiting: int | None = None
    oldest_seconds: float | None = None
    """Age of the oldest waiting request; 0 if none waits."""
    latency_p50_seconds: float | None = None
    """From the end of a trajectory to its result, since the driver started."""
    latency_p95_seconds: float | None = None
    invalid: dict[str, int] | None = None
    """Samples without a valid score since the driver started, by reason."""


class Sample(NamedTuple):
    """One line of /metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class RewardInfo:
    """What the job and its status say about one reward."""

    name: str
    spec: RewardBase | None = None
    """None: its RewardModel could not be read."""
    ready: int | None = None
    replicas: int | None = None
    scaling: RewardScaling | None = None


@dataclass(frozen=True)
class Metrics:
    """The contents of /metrics. None: no answer."""

    driver: Sequence[Sample] | None = None
    servers: Mapping[str, Sequence[Sequence[Sample]] | None] = field(default_factory=dict)
    """By reward, of each ready Pod. None: one of the Pods did not answer, so sums would be partial."""


def parse_metrics(text: str) -> list[Sample]:
    """Parse Prometheus' text format; return no samples if the text is something else."""
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return []
    return [Sample(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def build_row(info: RewardInfo, metrics: Metrics) -> RewardRow:
    """Combine the facts about one reward."""
    servers = metrics.servers.get(info.name)
    samples = None if servers is None else [sample for server in servers for sample in server]
    waiting, oldest = _queue(info.name, metrics)
    return RewardRow(
        name=info.name,
        kind=info.spec.kind or None if info.spec else None,
        ready=info.ready,
        replicas=info.replicas,
        slots_wanted=info.scaling.slots if info.scaling else None,
        slots_given=_slots_given(info, samples),
        slots_in_use=_whole(_total(samples, "rljob_reward_slots_in_use")),
        waiting=waiting,
        oldest_seconds=oldest,
        latency_p50_seconds=_quantile(metrics.driver, info.name, 0.5),
        latency_p95_seconds=_quantile(metrics.driver, info.name, 0.95),
        invalid=_invalid(metrics.driver, info.name),
    )


def _slots_given(info: RewardInfo, samples: Sequence[Sample] | None) -> int | None:
    reported = _whole(_total(samples, "rljob_reward_slots_total"))
    if reported is not None or info.spec is None or info.spec.http is not None or info.ready is None:
        return reported
    return info.ready * info.spec.slots


def _queue(reward: str, metrics: Metrics) -> tuple[int | None, float | None]:
    """Return the number and maximum age of requests that wait at the servers, or at the driver for a server."""
    answers = metrics.servers.get(reward, ())
    if answers is None:
        return None, None
    servers = [sample for server in answers for sample in server]
    driver = [sample for sample in metrics.driver or () if sample.labels.get("reward") == reward]
    lengths = _values(servers, "rljob_reward_queue_length") + _values(driver, "rljob_reward_waiting")
    ages = _values(servers, "rljob_reward_queue_oldest_seconds")
    ages += _values(driver, "rljob_reward_waiting_oldest_seconds")
    return _whole(math.fsum(lengths)) if lengths else None, max(ages, default=None)


def _values(samples: Iterable[Sample] | None, name: str) -> list[float]:
    return [sample.value for sample in samples or () if sample.name == name]


def _total(samples: Iterable[Sample] | None, name: str) -> float | None:
    values = _values(samples, name)
    return math.fsum(values) if values else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _invalid(driver: Sequence[Sample] | None, reward: str) -> dict[str, int] | None:
    """Return counts by reason, largest first; None before the driver has any result of this reward."""
    found = [
        sample
        for sample in driver or ()
        if sample.name == "rljob_reward_invalid_total" and sample.labels.get("reward") == reward and sample.value
    ]
    if not found and not _has_results(driver, reward):
        return None
    reasons: dict[str, int] = {}
    for sample in found:
        reason = sample.labels.get("reason", "?")
        reasons[reason] = reasons.get(reason, 0) + round(sample.value)
    return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))


def _has_results(driver: Sequence[Sample] | None, reward: str) -> bool:
    return any(
        sample.name == "rljob_reward_latency_seconds_count" and sample.labels.get("reward") == reward and sample.value
        for sample in driver or ()
    )


def _quantile(driver: Sequence[Sample] | None, reward: str, share: float) -> float | None:
    """Interpolate the driver's histogram over all lanes and outcomes linearly, as Prometheus does."""
    counts: dict[float, float] = {}
    for sample in driver or ():
        if sample.name == "rljob_reward_latency_seconds_bucket" and sample.labels.get("reward") == reward:
            edge = float(sample.labels["le"])
            counts[edge] = counts.get(edge, 0.0) + sample.value
    edges = sorted(counts)
    if not edges or not counts[edges[-1]]:
        return None
    wanted, below, low = share * counts[edges[-1]], 0.0, 0.0
    for edge in edges:
        if counts[edge] >= wanted:
            if math.isinf(edge):
                return low
            return low + (edge - low) * (wanted - below) / (counts[edge] - below)
        below, low = counts[edge], edge
    return low


def row_cells(row: RewardRow) -> list[str]:
    """Return the cells of HEADER's columns."""
    pods = UNKNOWN if row.ready is None or row.replicas is None else f"{row.ready}/{row.replicas}"
    numbers = (row.slots_wanted, row.slots_given, row.slots_in_use, row.waiting)
    times = (row.oldest_seconds, row.latency_p50_seconds, row.latency_p95_seconds)
    return [
        *(row.name, row.kind or UNKNOWN, pods),
        *(UNKNOWN if number is None else str(number) for number in numbers),
        *(UNKNOWN if seconds is None else format_short(seconds) for seconds in times),
        describe_invalid(row.invalid),
    ]


def describe_invalid(invalid: Mapping[str, int] | None) -> str:
    if invalid is None:
        return UNKNOWN
    return ", ".join(f"{count} {reason}" for reason, count in invalid.items()) or "0"


def format_short(seconds: float) -> str:
    """At most five characters: 0s, 12ms, 4.2s, 37s, 12m, 3h."""
    if seconds == 0:
        return "0s"
    if seconds < _MIN_SECONDS_UNIT:
        return f"{max(1, round(1000 * seconds))}ms"
    if seconds < _MAX_SECONDS_WITH_FRACTION:
        return f"{seconds:.1f}s"
    if seconds < 600:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 36000 else f"{seconds / 3600:.0f}h"
