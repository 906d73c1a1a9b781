"""The operator's Prometheus metrics, in a registry of their own. Recording alone; `health` serves them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_api.manifest.scaling import RewardScaling
from rljob_operator.backend import JobKey
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
            "Requests that should execute at once, by demand alone, at the last change of replicas.",
            _SCALED,
            registry=self.registry,
        )
        self._scaling = Gauge(
            "rljob_reward_scaling_replicas",
            "Replicas of an autoscaled reward: those wanted, within its bounds, and the most it may have.",
            [*_SCALED, "kind"],
            registry=self.registry,
        )

    def record_owner(self, key: JobKey, kind: str, owner: RLJob | RewardModel | None) -> None:
        """What was last decided for the rewards of a job, or for a RewardModel; None: it is gone."""
        where = (key.namespace, key.name if kind == "RLJob" else f"rewardmodel/{key.name}")
        decided = dict(_decisions(owner)) if owner else {}
        for reward, (scaling, most) in decided.items():
            self._scaled.add((*where, reward))
            self._slots_wanted.labels(*where, reward).set(scaling.slots)
            self._scaling.labels(*where, reward, "wanted").set(scaling.replicas)
            self._scaling.labels(*where, reward, "max").set(most)
        for scaled in [s for s in self._scaled if s[:2] == where and s[2] not in decided]:
            self._forget(scaled)

    def _forget(self, scaled: tuple[str, str, str]) -> None:
        """What it wanted last is no demand any more."""
        self._scaled.remove(scaled)
        self._slots_wanted.remove(*scaled)
        for kind in ("wanted", "max"):
            self._scaling.remove(*scaled, kind)

    def on_response(self, verb: str, path: str, code: int) -> None:
        resource = next((part for part in reversed(path.split("/")) if part in _PLURALS), "other")
        self.calls.labels(verb, resource, str(code)).inc()


def _decisions(owner: RLJob | RewardModel) -> Iterator[tuple[str, tuple[RewardScaling, int]]]:
    """(reward, (last decision, most replicas)) of each autoscaled reward."""
    if isinstance(owner, RewardModel):
        if owner.spec.autoscaling and owner.status.scaling:
            yield owner.metadata.name, (owner.status.scaling, owner.spec.autoscaling.max_replicas)
        return
    records = {record.name: record for record in owner.status.scaling}
    for reward in owner.spec.rewards:
        if reward.autoscaling and reward.name in records:
            yield reward.name, (records[reward.name], reward.autoscaling.max_replicas)
