"""The operator's Prometheus metrics, in their own registry. Only records; `health` serves them."""

from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.scaling import RewardScaling
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.manifest.services.user import USER_SERVICE
from rljob_core.backend import JobKey, Key, Owner
from rljob_core.plan.progress import find_stalls

_REWARD_LABELS = ["namespace", "owner", "reward"]
_FAILED = "Failed"
FAILURE_REASONS = ("UserError", "HeadFailed", "BackoffLimitExceeded", "DeadlineExceeded", "InvalidSpec")
"""Reasons of the condition Failed. Exported as 0 from the start, so that increase() sees the first failure; not by
namespace, for which that is impossible. rljob_job_phase names the jobs."""


class JobPhases(Collector):
    """The gauge rljob_job_phase: one series of value 1 for each job, whose label `phase` is the current one.

    Not a Gauge: its children would be objects with locks, at 5,000 jobs some MiB, and a change of the phase would have
    to remove one.
    """

    def __init__(self) -> None:
        self._phases: dict[JobKey, str] = {}

    def set(self, key: JobKey, phase: str) -> str | None:
        """Record a phase, and return the previous one; None: this process has not seen the job before."""
        was, self._phases[key] = self._phases.get(key), phase
        return was

    def remove(self, key: JobKey) -> None:
        self._phases.pop(key, None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "rljob_job_phase", "1 for the current phase of each job.", labels=["namespace", "name", "phase"]
        )
        for key, phase in self._phases.items():
            family.add_metric([key.namespace, key.name, phase], 1)
        yield family


class JobStalls(Collector):
    """The gauge rljob_job_stalled: a series of value 1 for each reason for which a job makes no progress."""

    def __init__(self) -> None:
        self._reasons: dict[JobKey, frozenset[str]] = {}

    def set(self, key: JobKey, reasons: frozenset[str]) -> None:
        if reasons:
            self._reasons[key] = reasons
        else:
            self._reasons.pop(key, None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "rljob_job_stalled",
            "1 for each reason for which a running job makes no progress.",
            labels=["namespace", "name", "reason"],
        )
        for key, reasons in self._reasons.items():
            for reason in sorted(reasons):
                family.add_metric([key.namespace, key.name, reason], 1)
        yield family


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
        self.refused_statuses = Gauge(
            "rljob_operator_refused_statuses",
            "Objects whose status the API server does not store.",
            registry=self.registry,
        )
        self.loop_stall = Histogram(
            "rljob_operator_loop_stall_seconds",
            "How late the event loop runs what is due, sampled 10 times a second.",
            buckets=(0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
            registry=self.registry,
        )
        self.errors = Counter("rljob_operator_errors", "Failed reconciles.", ["reason"], registry=self.registry)
        self.calls = Counter(
            "rljob_operator_api_calls",
            "Requests to the API server.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.leader = Gauge("rljob_operator_is_leader", "1 while this replica leads.", registry=self.registry)
        self._job_phases = JobPhases()
        self._job_stalls = JobStalls()
        self.registry.register(self._job_phases)
        self.registry.register(self._job_stalls)
        self._job_failures = Counter(
            "rljob_job_failures",
            "Jobs that became Failed, by the reason of the condition.",
            ["reason"],
            registry=self.registry,
        )
        for reason in FAILURE_REASONS:
            self._job_failures.labels(reason)
        self._slots_wanted = Gauge(
            "rljob_reward_slots_wanted",
            "Concurrent requests that the demand required at the last change of replicas.",
            _REWARD_LABELS,
            registry=self.registry,
        )
        self._scaling = Gauge(
            "rljob_reward_scaling_replicas",
            "Replicas of an autoscaled reward, user, tool or runner: the desired number, and its maximum.",
            [*_REWARD_LABELS, "kind"],
            registry=self.registry,
        )

    def record_owner(self, key: Key, owner: Owner | None) -> None:
        """Record a job's phase, why it makes no progress, and the last autoscaling decisions of a job or RewardModel;
        None: it was deleted."""
        if isinstance(key, JobKey):
            self._record_phase(key, owner)
            self._job_stalls.set(key, find_stalls(owner.status) if isinstance(owner, RLJob) else frozenset())
        name = key.name if isinstance(key, JobKey) else f"rewardmodel/{key.name}"
        for gauge in (self._slots_wanted, self._scaling):
            gauge.remove_by_labels({"namespace": key.namespace, "owner": name})
        for reward, (scaling, max_replicas) in _decisions(owner) if owner else ():
            self._slots_wanted.labels(key.namespace, name, reward).set(scaling.slots)
            self._scaling.labels(key.namespace, name, reward, "wanted").set(scaling.replicas)
            self._scaling.labels(key.namespace, name, reward, "max").set(max_replicas)

    def _record_phase(self, key: JobKey, job: Owner | None) -> None:
        if not isinstance(job, RLJob):
            self._job_phases.remove(key)
            return
        phase = job.status.phase or "Pending"
        was = self._job_phases.set(key, phase)
        # What failed before this process started was counted by another one.
        if phase == _FAILED and was not in (None, _FAILED):
            failed = next((c for c in job.status.conditions if c.type == _FAILED), None)
            self._job_failures.labels(failed.reason if failed else "").inc()

    def on_response(self, verb: str, path: str, code: int) -> None:
        resource = next((part for part in reversed(path.split("/")) if part in self._resources), "other")
        self.calls.labels(verb, resource, str(code)).inc()


def _decisions(owner: Owner) -> Iterator[tuple[str, tuple[RewardScaling, int]]]:
    """Yield (name, (last decision, maxReplicas)) of each autoscaled service; none of an object that is invalid."""
    if "spec" not in owner.model_fields_set:
        return
    if not isinstance(owner, RLJob):
        if owner.spec.autoscaling and owner.status.scaling:
            yield owner.metadata.name, (owner.status.scaling, owner.spec.autoscaling.max_replicas)
        return
    records = {record.name: record for record in owner.status.scaling}
    agent = owner.spec.agent
    services = [(reward.name, reward.autoscaling) for reward in owner.spec.rewards]
    services += [(tool.name, tool.autoscaling) for tool in agent.tools]
    services += [(USER_SERVICE, agent.user.autoscaling)] if agent.user else []
    services += [(RUNNER_SERVICE, agent.runner.autoscaling)] if agent.runner else []
    for name, autoscaling in services:
        if autoscaling and name in records:
            yield name, (records[name], autoscaling.max_replicas)
