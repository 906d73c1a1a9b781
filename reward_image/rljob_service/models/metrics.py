"""Prometheus metrics of classifiers, judges and model users, in addition to those of every reward."""

from collections.abc import Callable
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

_COMMON_OUTCOMES = ("200", "429", "500", "503", "connection")
TokenKind = Literal["prompt", "completion"]
_KINDS: tuple[TokenKind, ...] = get_args(TokenKind)
_MAX_TOKENS = 10**8
"""Limit of one request: a server may report anything, and charging more would block the rate limit indefinitely."""


class UpstreamMetrics:
    def __init__(self, registry: CollectorRegistry, reward: str) -> None:
        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, ("reward", label), registry=registry)

        self._reward = reward
        self._requests = counter(
            "rljob_reward_calls", "Requests to the model's server, by HTTP status or `connection`.", "outcome"
        )
        self._tokens = counter("rljob_reward_tokens", "Tokens of these requests, as counted by the server.", "kind")
        self._waits = counter(
            "rljob_reward_limit_wait_seconds", "Time for which requests waited while slots were free.", "limit"
        )
        self._replicas = Gauge(
            "rljob_reward_limit_peers", "Replicas that share the rate limits.", ("reward",), registry=registry
        )
        self._pause = Gauge(
            "rljob_reward_limit_pause_seconds",
            "Time until the next request, after a 429 with Retry-After.",
            ("reward",),
            registry=registry,
        )
        for outcome in _COMMON_OUTCOMES:  # exported as 0 from the start, so that rate() sees the first event
            self._requests.labels(reward, outcome)
        for kind in ("prompt", "completion"):
            self._tokens.labels(reward, kind)

    def record_request(self, outcome: str) -> None:
        self._requests.labels(self._reward, outcome).inc()

    def record_tokens(self, answer: dict[str, Any]) -> None:
        """Count what an answer says about its request's tokens."""
        for kind in _KINDS:
            self._tokens.labels(self._reward, kind).inc(count_tokens(answer, kind))

    def watch_pause(self, seconds: Callable[[], float]) -> None:
        """Read the rest of the pause at each scrape."""
        self._pause.labels(self._reward).set_function(seconds)

    def record_wait(self, limit: str, seconds: float) -> None:
        self._waits.labels(self._reward, limit).inc(seconds)

    def record_replicas(self, number: int) -> None:
        self._replicas.labels(self._reward).set(number)


def count_tokens(answer: dict[str, Any], kind: TokenKind) -> float:
    """Return the tokens that the server reports in OpenAI's `usage`; 0 if it does not."""
    usage = answer.get("usage")
    value = usage.get(f"{kind}_tokens") if isinstance(usage, dict) else None
    return float(value) if isinstance(value, int | float) and 0 < value <= _MAX_TOKENS else 0.0
