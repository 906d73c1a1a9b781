"""Jobs and RewardModels with the replicas that autoscaling decides now. Pure.

The decision of `autoscale` becomes the replicas of the reward, user, tool or runner, so that all builders and counts
use it, and the record becomes part of the status. Invariant: a manifest without autoscaling is returned unchanged.
"""

import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.scaling import RewardScaling
from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import Demand, Event, Manifest, ObservedState
from rljob_core.children.common import build_role_labels, role_of_service
from rljob_core.plan import autoscale, conditions
from rljob_core.plan.autoscale import ScalingPolicy
from rljob_core.plan.observed_job import find_condition, find_pods, is_ready, is_running_head, labels_of


def scale_job(job: RLJob, observed: ObservedState, now: datetime) -> tuple[RLJob, float | None]:
    """The job with decided replicas, and when to decide again. A finished job keeps its last records; a suspended job
    starts again without any."""
    if conditions.is_finished(job.status):
        return job, None
    if job.spec.suspend or not is_autoscaled(job):
        return (_set_records(job, []) if job.status.scaling else job), None
    name, pods = job.metadata.name, find_pods(job, observed)
    has_driver, last = any(map(is_running_head, pods)), {record.name: record for record in job.status.scaling}
    records, waits = list[RewardScaling](), list[float | None]()
    for service in job.spec.services:
        settings = service.settings
        if settings.autoscaling is None:
            continue
        demands = [autoscale.read_demand(name, observed.driver, settings.name)] if has_driver else []
        samples = "samples" if service.kind == "reward" else "episodes"
        policy = ScalingPolicy(settings.name, settings.autoscaling, settings.slots, samples)
        labels = build_role_labels(role_of_service(service), settings.name)
        own = [pod for pod in pods if labels.items() <= labels_of(pod).items()]
        record, wait = _decide(policy, demands, last.get(settings.name), own, now)
        records.append(record)
        waits.append(wait)
    spec = job.spec.with_replicas({record.name: record.replicas for record in records})
    return _set_records(job.model_copy(update={"spec": spec}), records), min(filter(None, waits), default=None)


def scale_model(model: RewardModel, observed: ObservedState, now: datetime) -> tuple[RewardModel, float | None]:
    """The model with decided replicas, and when to decide again."""
    spec, record, wait = model.spec, None, None
    if spec.autoscaling:
        policy = ScalingPolicy(model.metadata.name, spec.autoscaling, spec.slots)
        record, wait = _decide(policy, observed.demands, model.status.scaling, find_pods(model, observed), now)
        spec = spec.model_copy(update={"replicas": record.replicas})
    status = model.status.model_copy(update={"scaling": record})
    return model.model_copy(update={"spec": spec, "status": status}), wait


def _decide(
    policy: ScalingPolicy, demands: Sequence[Demand], last: RewardScaling | None, pods: list[Manifest], now: datetime
) -> tuple[RewardScaling, float | None]:
    record = autoscale.decide_replicas(policy, demands, last, now, measure_startup_seconds(pods))
    return record, autoscale.next_decision_seconds(policy, demands, record, now)


def is_autoscaled(job: RLJob) -> bool:
    agent = job.spec.agent
    services: list[ServiceSettings | None] = [*job.spec.rewards, *agent.tools, agent.user, agent.runner]
    return any(service is not None and service.autoscaling for service in services)


def read_demands(job: RLJob, observed: ObservedState, model: str) -> list[Demand]:
    """A job's demand for a RewardModel: one per reward that references it; none without a driver."""
    if conditions.is_finished(job.status) or not any(map(is_running_head, find_pods(job, observed))):
        return []
    return [
        autoscale.read_demand(f"{job.metadata.name}/{reward.name}", observed.driver, reward.name)
        for reward in job.spec.rewards
        if reward.reward_model_ref and reward.reward_model_ref.name == model
    ]


def measure_startup_seconds(pods: Iterable[Manifest]) -> float:
    """Median time from the creation of a Pod until it is ready, over the ready Pods."""
    times = []
    for pod in filter(is_ready, pods):
        created = pod["metadata"].get("creationTimestamp")
        ready = find_condition(pod, "Ready").get("lastTransitionTime")
        if created and ready:
            times.append((datetime.fromisoformat(ready) - datetime.fromisoformat(created)).total_seconds())
    if not times:
        return autoscale.LEAD_SECONDS
    return min(max(statistics.median(times), autoscale.MIN_LEAD_SECONDS), autoscale.MAX_LEAD_SECONDS)


def scaling_events(job: RLJob, new: Sequence[RewardScaling]) -> tuple[Event, ...]:
    """One event per service whose replicas changed. `job`: with its earlier status."""
    before = {record.name: record for record in job.status.scaling}
    rewards = {reward.name for reward in job.spec.rewards}
    names = dict.fromkeys(rewards, "reward ") | {tool.name: "tool " for tool in job.spec.agent.tools}
    return tuple(
        event
        for record in new
        for event in autoscale.derive_scaling_events(
            before.get(record.name), record, names.get(record.name, "") + record.name
        )
    )


def _set_records(job: RLJob, records: list[RewardScaling]) -> RLJob:
    return job.model_copy(update={"status": job.status.model_copy(update={"scaling": records})})
