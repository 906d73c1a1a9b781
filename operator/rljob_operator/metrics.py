"""The operator's Prometheus metrics, in a registry of their own. Recording alone; `health` serves them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rljob_operator.kube.resources import WATCHED

_PLURALS = {resource.plural for resource in WATCHED} | {"leases", "customresourcedefinitions"}
_SCALED = ["namespace", "owner", "reward"]


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile = Histogram(
            "rljob_operator_reconcile_seconds", "Time of one reconcile.", ["kind"], registry=self.registry
        )
        self.depth = Gauge("rljob_operator_queue_depth", "Keys that wait for a worker.", registry=self.registry)
        self.age = Gauge("rljob_operator_queue_oldest_seconds", "Wait of the oldest key.", registry=self.registry)
        self.errors = Counter("rljob_operator_errors", "Failed reconciles.", ["reason"], registry=self.registry)
        self.calls = Counter(
            "rljob_operator_api_calls",
            "Requests to the API server.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.leader = Gauge("rljob_operator_is_leader", "1 while this replica leads.", registry=self.registry)
        self._scaled: set[tuple[str, str, str]] = set()
        self._slots_wanted = Gauge(
            "rljob_reward_slots_wanted",
            "Requests that should execute at once, by demand alone: no bounds, no spares.",
            _SCALED,
            registry=self.registry,
        )
        self._scaling = Gauge(
            "rljob_reward_scaling_replicas",
            "Replicas of an autoscaled reward: those wanted, within its bounds, and the most it may have.",
            [*_SCALED, "kind"],
            registry=self.registry,
        )

    def record_scaling(self, namespace: str, owner: str, reward: str, *, slots: float, wanted: int, most: int) -> None:
        """An autoscaling decision for a reward of `owner`, an RLJob or a RewardModel."""
        self._scaled.add((namespace, owner, reward))
        self._slots_wanted.labels(namespace, owner, reward).set(slots)
        self._scaling.labels(namespace, owner, reward, "wanted").set(wanted)
        self._scaling.labels(namespace, owner, reward, "max").set(most)

    def forget_scaling(self, namespace: str, owner: str) -> None:
        """The owner is gone: what it wanted last is no demand."""
        for scaled in [scaled for scaled in self._scaled if scaled[:2] == (namespace, owner)]:
            self._scaled.remove(scaled)
            self._slots_wanted.remove(*scaled)
            for kind in ("wanted", "max"):
                self._scaling.remove(*scaled, kind)

    def on_response(self, verb: str, path: str, code: int) -> None:
        resource = next((part for part in reversed(path.split("/")) if part in _PLURALS), "other")
        self.calls.labels(verb, resource, str(code)).inc()
