"""What a judge or a model tells Prometheus beside what every reward tells: calls, tokens, waits for limits."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from rljob_reward.server.metrics import Metrics

_USUAL_OUTCOMES = ("200", "429", "500", "503", "connection")


class CallMetrics:
    """Counters in the reward's own registry."""

    def __init__(self, metrics: Metrics) -> None:
        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, ("reward", label), registry=metrics.registry)

        self._reward = metrics.reward
        self._calls = counter(
            "rljob_reward_calls", "Requests to the model's server, by its status or `connection`.", "outcome"
        )
        self._tokens = counter("rljob_reward_tokens", "Tokens that they took, as the server counted them.", "kind")
        self._waits = counter(
            "rljob_reward_limit_wait_seconds", "Time in which requests waited though slots were free.", "limit"
        )
        self._peers = Gauge(
            "rljob_reward_limit_peers",
            "Replicas over which the limits are shared; 0: this one has no share yet.",
            ("reward",),
            registry=metrics.registry,
        )

        for outcome in _USUAL_OUTCOMES:  # what appears with its first event has no rate
            self._calls.labels(self._reward, outcome)
        for kind in ("prompt", "completion"):
            self._tokens.labels(self._reward, kind)

    def record_call(self, outcome: str) -> None:
        self._calls.labels(self._reward, outcome).inc()

    def record_tokens(self, prompt: float, completion: float) -> None:
        self._tokens.labels(self._reward, "prompt").inc(prompt)
        self._tokens.labels(self._reward, "completion").inc(completion)

    def record_wait(self, limit: str, seconds: float) -> None:
        self._waits.labels(self._reward, limit).inc(seconds)

    def record_peers(self, number: int) -> None:
        self._peers.labels(self._reward).set(number)
