"""The operator's Prometheus metrics, in a registry of their own. Recording alone; `health` serves them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rljob_operator.kube.resources import WATCHED

_PLURALS = {resource.plural for resource in WATCHED} | {"leases", "customresourcedefinitions"}


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

    def on_response(self, verb: str, path: str, code: int) -> None:
        resource = next((part for part in reversed(path.split("/")) if part in _PLURALS), "other")
        self.calls.labels(verb, resource, str(code)).inc()
