"""The operator's Prometheus metrics, in their own registry. Only records; `health` serves them."""

from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.scaling import RewardScaling
from rljob_operator.backend import JobKey, Key, Owner

_REWARD_LABELS = ["namespace", "owner", "reward"]


class OperatorMetrics:
    """`resources` are the plural names by which API calls are counted; all others count as 'other'."""

    def __init__(self, resources: Collection[str] = ()) -> None:
        self._resources = frozenset(resources)
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
        self._slots_wanted = Gauge(
            "rljob_reward_slots_wanted",
            "Concurrent requests that the demand required at the last change of replicas.",
            _REWARD_LABELS,
            registry=self.registry,
        )
        self._scaling = Gauge(
            "rljob_reward_scaling_replicas",
            "Replicas of an autoscaled reward: the desired number, and its maximum.",
            [*_REWARD_LABELS, "kind"],
            registry=self.registry,
        )

    def record_owner(self, key: Key, owner: Owner | None) -> None:
        """Record the last autoscaling decisions of a job or RewardModel; None: it was deleted."""
        name = key.name if isinstance(key, JobKey) else f"rewardmodel/{key.name}"
        for gauge in (self._slots_wanted, self._scaling):
            gauge.remove_by_labels({"namespace": key.namespace, "owner": name})
        for reward, (scaling, max_replicas) in _decisions(owner) if owner else ():
            self._slots_wanted.labels(key.namespace, name, reward).set(scaling.slots)
            self._scaling.labels(key.namespace, name, reward, "wanted").set(scaling.replicas)
            self._scaling.labels(key.namespace, name, reward, "max").set(max_replicas)

    def on_response(self, verb: str, path: str, code: int) -> None:
        resource = next((part for part in reversed(path.split("/")) if part in self._resources), "other")
        self.calls.labels(verb, resource, str(code)).inc()


def _decisions(owner: Owner) -> Iterator[tuple[str, tuple[RewardScaling, int]]]:
    """Yield (reward, (last decision, maxReplicas)) of each autoscaled reward."""
    if not isinstance(owner, RLJob):
        if owner.spec.autoscaling and owner.status.scaling:
            yield owner.metadata.name, (owner.status.scaling, owner.spec.autoscaling.max_replicas)
        return
    records = {record.name: record for record in owner.status.scaling}
    for reward in owner.spec.rewards:
        if reward.autoscaling and reward.name in records:
            yield reward.name, (records[reward.name], reward.autoscaling.max_replicas)
