"""Rewards and services of agents as table rows, for every view of a job: replicas, load, latency, invalid results.

Invariant: an unknown number is None and shown as a dash, never as zero.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rljob_api.manifest.job_spec import ServiceKind
from rljob_api.manifest.scaling import RewardScaling
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.reward import RewardBase
from rljob_api.wire.contract import PORT_DRIVER, PORT_SERVICE
from rljob_core.backend import Manifest

HEADER = ("SERVICE", "KIND", "READY", "WANT", "GIVEN", "USED", "QUEUE", "AGE", "P50", "P95", "INVALID")
"""WANT, GIVEN and USED are slots. QUEUE and AGE describe waiting requests. P50 and P95: from trajectory to score; of an
agent from a call, or the start of an episode, to its end."""
UNKNOWN = "-"
_QUEUES = ("rljob_reward_queue_length", "rljob_reward_waiting", "rljob_agent_waiting")
_LATENCIES = ("rljob_reward_latency_seconds", "rljob_agent_call_seconds")
_BUCKETS = tuple(f"{name}_bucket" for name in _LATENCIES)
_MAX_SECONDS_WITH_FRACTION = 9.95
_MIN_SECONDS_UNIT = 0.0995


@dataclass(frozen=True)
class RewardRow:
    """One reward, user, tool or runner. None: unknown. Field names are part of --output json."""

    name: str
    kind: str | None = None
    """function, model, judge, http; user, tool, runner."""
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
    """Samples without a valid score, or failed calls, since the driver started, by reason."""


@dataclass(frozen=True)
class RewardMetrics:
    """The contents of /metrics. None: no answer."""

    driver: Sequence[Sample] | None = None
    servers: Mapping[str, Sequence[Sequence[Sample]] | None] = field(default_factory=dict)
    """By reward, of each ready Pod. None: one of the Pods did not answer, so sums would be partial."""


def parse_metrics(text: str) -> list[Sample]:
    """Parse Prometheus' text format; return no samples if the text is something else."""
    try:
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return []


async def gather_metrics(
    read: Callable[[Manifest, int], Awaitable[str]],
    heads: Sequence[Manifest],
    servers: Mapping[str, Sequence[Manifest] | None],
) -> RewardMetrics:
    """Read /metrics of the head and of each reward's Pods. `read` returns an empty text if a Pod does not answer."""

    async def read_all(pods: Sequence[Manifest], port: int) -> list[list[Sample]] | None:
        found = [parse_metrics(text) for text in await asyncio.gather(*(read(pod, port) for pod in pods))]
        return found if all(found) else None

    driver = await read_all(heads[:1], PORT_DRIVER)
    known = {name: pods for name, pods in servers.items() if pods is not None}
    answers = await asyncio.gather(*(read_all(pods, PORT_SERVICE) for pods in known.values()))
    found = {**dict.fromkeys(servers), **dict(zip(known, answers, strict=True))}
    return RewardMetrics(driver[0] if driver else None, found)


def build_row(
    metrics: RewardMetrics,
    name: str,
    spec: RewardBase | CallService | None,
    ready: int | None = None,
    replicas: int | None = None,
    scaling: RewardScaling | None = None,
    service: ServiceKind = "reward",
) -> RewardRow:
    """Combine the facts about one reward or service of an agent. No `spec`: its RewardModel could not be read."""
    answers = metrics.servers.get(name, ())
    servers = [sample for server in answers or () for sample in server]
    label = "reward" if service == "reward" else "service"
    driver = [sample for sample in metrics.driver or () if sample.labels.get(label) == name]
    slots_given = _total(servers, "rljob_reward_slots")
    if slots_given is None and spec is not None and spec.is_served and ready is not None:
        slots_given = ready * spec.slots
    ages = _values(servers, "rljob_reward_queue_oldest_seconds")
    ages += _values(driver, "rljob_reward_waiting_oldest_seconds", "rljob_agent_waiting_oldest_seconds")
    return RewardRow(
        name=name,
        kind=service if service != "reward" else spec.kind or None if spec else None,
        ready=ready,
        replicas=replicas,
        slots_wanted=scaling.slots if scaling else None,
        slots_given=slots_given,
        slots_in_use=_total(servers, "rljob_reward_slots_in_use"),
        # Requests wait at the servers, or at the driver for a server.
        waiting=None if answers is None else _total([*servers, *driver], *_QUEUES),
        oldest_seconds=None if answers is None else max(ages, default=None),
        latency_p50_seconds=_quantile(driver, 0.5),
        latency_p95_seconds=_quantile(driver, 0.95),
        invalid=_invalid(driver),
    )


def _values(samples: Iterable[Sample], *names: str) -> list[float]:
    return [sample.value for sample in samples if sample.name in names]


def _total(samples: Iterable[Sample], *names: str) -> int | None:
    values = _values(samples, *names)
    return round(math.fsum(values)) if values else None


def _invalid(driver: Sequence[Sample]) -> dict[str, int] | None:
    """Return counts by reason, largest first; None before the driver has any result of this reward."""
    reasons: Counter[str] = Counter()
    for sample in driver:
        if sample.name == "rljob_reward_invalid_total" and sample.value:
            reasons[sample.labels.get("reason", "?")] += round(sample.value)
        is_call = sample.name == "rljob_agent_call_seconds_count" and sample.value
        if is_call and (outcome := sample.labels.get("outcome", "?")) != "valid":
            reasons[outcome] += round(sample.value)
    if not reasons and not any(_values(driver, *(f"{name}_count" for name in _LATENCIES))):
        return None
    return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))


def _quantile(driver: Sequence[Sample], share: float) -> float | None:
    """Interpolate the driver's histogram over all lanes and outcomes linearly, as Prometheus does."""
    counts: defaultdict[float, float] = defaultdict(float)
    for sample in driver:
        if sample.name in _BUCKETS:
            counts[float(sample.labels["le"])] += sample.value
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
    pods = UNKNOWN if row.ready is None or row.replicas is None else f"{row.ready}/{row.replicas}"
    numbers = (row.slots_wanted, row.slots_given, row.slots_in_use, row.waiting)
    invalid = ", ".join(f"{count} {reason}" for reason, count in (row.invalid or {}).items())
    times = (row.oldest_seconds, row.latency_p50_seconds, row.latency_p95_seconds)
    return [
        *(row.name, row.kind or UNKNOWN, pods),
        *(UNKNOWN if number is None else str(number) for number in numbers),
        *(UNKNOWN if seconds is None else format_short(seconds) for seconds in times),
        UNKNOWN if row.invalid is None else invalid or "0",
    ]


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
