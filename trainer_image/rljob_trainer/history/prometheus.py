"""The driver's Prometheus metrics: what a step did, what the rewards returned, and what they are doing now."""

import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.run.gauges import flatten, name_gauge
from rljob_api.run.metrics import AnyRecord, EvaluationRecord, StepRecord
from rljob_api.run.summaries import DeliveryCounts
from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.calls import CallResult
from rljob_trainer.episodes.types import Episode, ScoredResult
from rljob_trainer.history.metrics import NO_TOOL, own_components
from rljob_trainer.services.client import ServiceClient

log = logging.getLogger(__name__)

LATENCY_BUCKETS_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""The chart's values.schema.json lists them: an alert's latency must be one of the buckets."""
_Result = TypeVar("_Result")
LatencyPart = Literal["wait", "queue", "execute", "retry"]
SCORE_BUCKETS = (
    *(-10, -5, -2, -1, -0.75, -0.5, -0.25, -0.1, -0.001, 0, 0.1, 0.25, 0.5, 0.75, 0.9),
    *(0.999, 1, 2, 5, 10),  # most rewards return 0 and 1: each has a (nearly) separate bucket
)
SCORE = "score"
VALID = "valid"
PHASES = ("starting", "generate", "score", "update", "publish", "sleep", "wake", "sync", "evaluate", "checkpoint")
_MAX_COMPONENTS = 32
"""Per reward."""
_MAX_GAUGES = 256
"""Series of a metric of a step or an evaluation, such as its components."""
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


GATEWAY_PARTS = ("to_engine", "to_client")
_GATEWAY_GAUGES = {
    "episodes": "Episodes that programs and environments play now.",
    "in_flight": "Requests that wait for a completion.",
    "oldest_seconds": "Age of the oldest of these requests.",
}
_SERVICE_GAUGES = {
    "clients": "Clients of a training service that have a session now.",
    "adapters": "Adapters that a training service holds.",
}
LAG_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5)
"""The operator waits 2 s for /status, and a readiness probe 3 s."""
OVERHEAD_BUCKETS_SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)

_AGENT_GAUGES = {
    "in_flight": "Calls that wait for the result of this service.",
    "waiting": "Calls that wait for a free replica.",
    "waiting_oldest_seconds": "Age of the oldest waiting call.",
    "replicas": "Ready replicas that were found.",
}


def split_latency(result: ScoredResult) -> dict[LatencyPart, float]:
    """Return the seconds of a result's latency by what took them. The server reports the last attempt alone, so what an
    earlier one took is a part of the retries."""
    execute = min(result.execute_seconds, result.latency_seconds)
    queue = min(result.queue_seconds, result.latency_seconds - execute)
    rest = result.latency_seconds - execute - queue
    wait, retry = (0.0, rest) if result.retries else (rest, 0.0)
    return {"wait": wait, "retry": retry, "queue": queue, "execute": execute}


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
        self._parts = Histogram(
            "rljob_reward_latency_part_seconds",
            "The latency by what took it: wait at the driver, queue and execution at the server, and earlier attempts.",
            ["reward", "lane", "part"], registry=registry, buckets=LATENCY_BUCKETS_SECONDS,
        )  # fmt: skip
        self._late = Counter(
            "rljob_reward_late",
            "Results later than the reward's timeoutSeconds after their episode's end.",
            ["reward", "lane"],
            registry=registry,
        )
        self._late_after: dict[str, float] = {}
        self._timeout = Gauge(
            "rljob_reward_timeout_seconds",
            "timeoutSeconds of the reward, after which a result is late.",
            ["reward"],
            registry=registry,
        )
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

        self._invalid = counter(
            "rljob_reward_invalid", "Samples without a valid score, after the last attempt.", "reward", "lane", "reason"
        )
        self._scored_failures = counter(
            "rljob_reward_scored_failures",
            "Failed samples that failurePolicy.scores gave a score.",
            "reward",
            "lane",
            "reason",
        )
        self._samples = counter("rljob_samples", "Samples scored.", "lane")
        self._tokens = counter("rljob_sampled_tokens", "Tokens sampled.", "lane")
        self.phases = counter("rljob_phase_seconds", "The driver's time; of a step, known at its end.", "phase")
        self._trained_tokens = counter(
            "rljob_trained_tokens",
            "Trained tokens, by the steps between the weights that sampled them and their training.",
            "staleness",
        )
        self._busy = counter(
            "rljob_busy_seconds", "Time in which each role worked, known at the end of a step. Roles overlap.", "role"
        )
        self._skipped = counter("rljob_skipped_updates", "Updates left out, because a number was not finite.")
        self._replaced = counter(
            "rljob_replaced_groups", "Groups replaced by those of other prompts, because their scores were equal."
        )
        self.mismatches = counter("rljob_weight_mismatches", "Rollouts that served weights with a wrong digest.")
        self.restarts = counter("rljob_restarts", "Restarts by the driver.", "role")
        self._calls = Histogram(
            "rljob_agent_call_seconds", "From a call of the user, a tool or the runner to its result, with retries.",
            ["service", "lane", "outcome"], registry=registry, buckets=LATENCY_BUCKETS_SECONDS,
        )  # fmt: skip
        self._episodes = counter("rljob_agent_episodes", "Conversations, by what ended them.", "lane", "end")
        self._turns = counter("rljob_agent_turns", "Answers of the policy in conversations.", "lane")
        self._tool_calls = counter("rljob_agent_tool_calls", "Calls that the policy wrote.", "lane", "tool", "outcome")
        self._segments = counter(
            "rljob_agent_further_segments",
            "Token sequences after the first one of a conversation, by why the chat template does not continue it.",
            "lane",
            "cause",
        )
        self._gateway_responses = counter(
            "rljob_gateway_responses", "Responses of the model gateway; 499: the client left.", "api", "model", "status"
        )
        self._gateway_overhead = Histogram(
            "rljob_gateway_overhead_seconds", "The gateway's own part of a turn, without the engine's.", ["part"],
            registry=registry, buckets=OVERHEAD_BUCKETS_SECONDS,
        )  # fmt: skip
        self.loop_lag = Histogram(
            "rljob_driver_loop_lag_seconds", "How late the driver's event loop runs what is due, ten times a second.",
            registry=registry, buckets=LAG_BUCKETS_SECONDS,
        )  # fmt: skip
        self._requests = Histogram(
            "rljob_service_request_seconds", "From a request of a training service's client to its result.",
            ["client", "request"], registry=registry, buckets=LATENCY_BUCKETS_SECONDS,
        )  # fmt: skip
        self._unanswered = Gauge(
            "rljob_service_requests", "Such requests that have no result yet.", ["client"], registry=registry
        )
        self._failures = counter(
            "rljob_agent_failures", "Conversations without a score, by what failed.", "lane", "service", "reason"
        )
        for phase in PHASES:
            self.phases.labels(phase)

    def register_rewards(self, clients: Mapping[str, ServiceClient[Any]]) -> None:
        """Export all rewards, whose clients a scrape reads. Counters start at 0: rate() shows their first event."""
        for name, client in clients.items():
            self._late_after[name] = client.timeout_seconds
            self._timeout.labels(name).set(client.timeout_seconds)
            for lane in get_args(Lane):
                self._latency.labels(name, lane, VALID)
                self._late.labels(name, lane)
                for part in get_args(LatencyPart):
                    self._parts.labels(name, lane, part)
                for reason in InvalidReason:
                    self._invalid.labels(name, lane, reason.value)
        collect = partial(_collect_services, "rljob_reward", "reward", clients, _REWARD_GAUGES, _REWARD_COUNTERS)
        self.registry.register(_Scraped(collect))

    def register_agent(self, clients: Mapping[str, ServiceClient[Any]]) -> None:
        """Export the simulated user, the tools and the runner. Counters start at 0: rate() shows their first event."""
        for name in clients:
            for lane in get_args(Lane):
                self._calls.labels(name, lane, VALID)
        self.registry.register(
            _Scraped(partial(_collect_services, "rljob_agent", "service", clients, _AGENT_GAUGES, {}))
        )

    def register_gateway(self, read_statistics: Callable[[], Mapping[str, float]]) -> None:
        """Export what the model gateway does now, which a scrape reads."""
        for part in GATEWAY_PARTS:
            self._gateway_overhead.labels(part)
        self.registry.register(_Scraped(partial(_collect_gauges, "rljob_gateway", _GATEWAY_GAUGES, read_statistics)))

    def register_service(self, read_counts: Callable[[], Mapping[str, float]]) -> None:
        """Export whom a training service serves, which a scrape reads."""
        self.registry.register(_Scraped(partial(_collect_gauges, "rljob_service", _SERVICE_GAUGES, read_counts)))

    async def measure(self, client: str, request: str, result: Awaitable[_Result]) -> _Result:
        """Return the result of a request of a training service's client."""
        with self._unanswered.labels(client).track_inprogress(), self._requests.labels(client, request).time():
            return await result

    def register_trackers(self, read_counts: Callable[[], Mapping[str, DeliveryCounts]]) -> None:
        """Export what became of the records for each tracker."""

        def collect() -> Iterator[Metric]:
            records = CounterMetricFamily(
                "rljob_tracker_records",
                "Records for a tracker (tensorboard, wandb, mlflow): sent, or lost.",
                labels=["tracker", "outcome"],
            )
            waiting = GaugeMetricFamily(
                "rljob_tracker_waiting_records", "Records that wait for a tracker's server.", labels=["tracker"]
            )
            for name, counts in read_counts().items():
                records.add_metric([name, "sent"], counts.sent)
                records.add_metric([name, "lost"], counts.lost)
                waiting.add_metric([name], counts.waiting)
            yield records
            yield waiting

        self.registry.register(_Scraped(collect))

    def record_response(self, api: str, model: str, status: int) -> None:
        """`api`: path without /v1/, such as chat/completions. `model`: policy, or one of agent.models."""
        self._gateway_responses.labels(api, model, str(status)).inc()

    def record_overhead(self, to_engine: float, to_client: float) -> None:
        """Seconds of one turn: from the request to the engine, and from the engine's answer to the client."""
        for part, seconds in zip(GATEWAY_PARTS, (to_engine, to_client), strict=True):
            self._gateway_overhead.labels(part).observe(seconds)

    def record_call(self, service: str, lane: Lane, result: CallResult, seconds: float) -> None:
        self._calls.labels(service, lane, VALID if result.reason is None else result.reason.value).observe(seconds)

    def _record_conversation(self, lane: Lane, episode: Episode) -> None:
        self._episodes.labels(lane, episode.end.value).inc()
        self._turns.labels(lane).inc(len(episode.turns))
        for call in (call for turn in episode.turns for call in turn.tool_calls):
            self._tool_calls.labels(lane, call.tool or NO_TOOL, "error" if call.error else VALID).inc()
        for each in episode.breaks:
            self._segments.labels(lane, each.cause).inc()
        if episode.failure is not None:
            self._failures.labels(lane, episode.failure.service, episode.failure.reason).inc()

    def record_scored(self, lane: Lane, episode: Episode) -> None:
        if episode.messages:
            self._record_conversation(lane, episode)
        self._samples.labels(lane).inc()
        self._tokens.labels(lane).inc(episode.num_sampled)
        for name, result in episode.results.items():
            cause = result.cause
            outcome = VALID if cause is None else cause.value
            self._latency.labels(name, lane, outcome).observe(result.latency_seconds)
            for part, seconds in split_latency(result).items():
                self._parts.labels(name, lane, part).observe(seconds)
            if result.latency_seconds > self._late_after.get(name, math.inf):
                self._late.labels(name, lane).inc()
            if cause is not None:
                counter = self._invalid if result.score is None else self._scored_failures
                counter.labels(name, lane, cause.value).inc()
            if result.score is not None:
                self._record_values(name, lane, result.score, result.components)
        if episode.own_reward is not None and episode.failure is None:
            self._record_values(RUNNER_SERVICE, lane, episode.own_reward, own_components(episode))

    def _record_values(self, reward: str, lane: Lane, score: float, components: Mapping[str, float]) -> None:
        self._record_value(reward, lane, SCORE, score)
        for component, value in components.items():
            if self._has_room(f"reward {reward}", component, _MAX_COMPONENTS):
                self._record_value(reward, lane, component, value)

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

    def log(self, record: AnyRecord) -> None:
        """Set the gauges, and count what a step did."""
        if isinstance(record, StepRecord):
            self._count_step(record)
        kind, of_set = record.type, [record.set] if isinstance(record, EvaluationRecord) else []
        for name, value in {**flatten(record), "number": record.step}.items():
            metric, label, key = name_gauge(kind, name)
            if not self._has_room(metric, "/".join([*of_set, key]), _MAX_GAUGES):
                continue
            if metric not in self._gauges:
                text = f"{metric.removeprefix(f'rljob_{kind}_')} of the last {kind}, as in metrics.jsonl."
                names = [*(["set"] if of_set else []), *([label] if label else [])]
                self._gauges[metric] = Gauge(metric, text, names, registry=self.registry)
            gauge, values = self._gauges[metric], [*of_set, *([key] if label else [])]
            (gauge.labels(*values) if values else gauge).set(value)

    def _count_step(self, record: StepRecord) -> None:
        for staleness, num_tokens in record.staleness_histogram.items():
            self._trained_tokens.labels(str(staleness)).inc(num_tokens)
        for role, share in record.busy_shares.items():
            self._busy.labels(role).inc(share * (record.step_seconds or 0.0))
        self._skipped.inc(record.num_skipped_updates)
        self._replaced.inc(record.num_replaced_groups)

    def render(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(frozen=True)
class _Scraped(Collector):
    """What a scrape reads: `collect` is called then."""

    collect: Callable[[], Iterator[Metric]]

    def describe(self) -> list[Metric]:
        return []  # so that registering does not collect


def _collect_gauges(prefix: str, texts: Mapping[str, str], read: Callable[[], Mapping[str, float]]) -> Iterator[Metric]:
    values = read()
    for name, text in texts.items():
        yield GaugeMetricFamily(f"{prefix}_{name}", text, value=values[name])


def _collect_services(
    prefix: str,
    label: str,
    clients: Mapping[str, ServiceClient[Any]],
    gauges: Mapping[str, str],
    counters: Mapping[str, str],
) -> Iterator[Metric]:
    """Yield what the clients of services do now: rewards, or the user, the tools and the runner of an agent."""
    statistics = {name: client.statistics() for name, client in clients.items()}
    for family, texts in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for metric_name, text in texts.items():
            metric = family(f"{prefix}_{metric_name}", text, labels=[label])
            for name, values in statistics.items():
                metric.add_metric([name], values[metric_name])
            yield metric
    attempts = CounterMetricFamily(f"{prefix}_attempts", "Requests, with retries and hedges.", labels=[label, "lane"])
    for name, client in clients.items():
        for lane in get_args(Lane):
            attempts.add_metric([name, lane], client.num_requests[lane])
    yield attempts
