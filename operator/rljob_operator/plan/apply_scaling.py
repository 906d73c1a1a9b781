"""Jobs and RewardModels with the replicas that their rewards shall have now. Pure.

Owns what autoscale's decision means for a manifest: spec.replicas of an autoscaled reward is the decision's, so that
every builder and every count goes by it, and the record is in the status. Leaves the decision to `autoscale`.
Invariant: a manifest without autoscaling comes back as it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward, RewardModel
from rljob_api.manifest.scaling import RewardScaling
from rljob_api.wire.contract import LABEL_REWARD, LABEL_ROLE
from rljob_operator.backend import Event, Manifest, Observed
from rljob_operator.children.common import HEAD
from rljob_operator.plan import conditions
from rljob_operator.plan.autoscale import (
    LEAD_SECONDS,
    MAX_LEAD_SECONDS,
    MIN_LEAD_SECONDS,
    Demand,
    Policy,
    decide,
    derive_scaling_events,
    next_look_seconds,
    read_demand,
)
from rljob_operator.plan.observed_job import find_pods, is_ready


@dataclass(frozen=True)
class ScaledJob:
    """A job, and when its demand is to be looked at again."""

    job: RLJob
    next_look_seconds: float | None = None


@dataclass(frozen=True)
class ScaledModel:
    """A RewardModel, and when its jobs' demand is to be looked at again."""

    model: RewardModel
    next_look_seconds: float | None = None


def scale_job(job: RLJob, observed: Observed, now: datetime) -> ScaledJob:
    """The job with decided replicas. One that has ended keeps what was decided last; a suspended one begins anew."""
    if conditions.is_finished(job.status):
        return ScaledJob(job)
    if job.spec.suspend or not is_autoscaled(job):
        return ScaledJob(_with_records(job, [])) if job.status.scaling else ScaledJob(job)
    pods = find_pods(job, observed)
    rewards: list[Reward] = []
    records: list[RewardScaling] = []
    looks: list[float] = []
    for reward in job.spec.rewards:
        if reward.autoscaling is None:
            rewards.append(reward)
            continue
        policy = Policy(reward.name, reward.autoscaling, reward.slots)
        demand = read_demand(job.metadata.name, observed.driver, reward.name, runs_driver(pods))
        last = next((record for record in job.status.scaling if record.name == reward.name), None)
        lead = measure_lead(pod for pod in pods if _labels(pod).get(LABEL_REWARD) == reward.name)
        record = decide(policy, [demand], last, now, lead).scaling
        look = next_look_seconds(policy, [demand] if runs_driver(pods) else [], record, now)
        looks += [] if look is None else [look]
        records.append(record)
        rewards.append(reward.model_copy(update={"replicas": record.replicas}))
    spec = job.spec.model_copy(update={"rewards": rewards})
    return ScaledJob(_with_records(job.model_copy(update={"spec": spec}), records), min(looks, default=None))


def scale_model(model: RewardModel, observed: Observed, now: datetime) -> ScaledModel:
    """The model with decided replicas."""
    if model.spec.autoscaling is None:
        if model.status.scaling is None:
            return ScaledModel(model)
        return ScaledModel(model.model_copy(update={"status": model.status.model_copy(update={"scaling": None})}))
    policy = Policy(model.metadata.name, model.spec.autoscaling, model.spec.slots)
    lead = measure_lead(find_pods(model, observed))
    record = decide(policy, observed.demands, model.status.scaling, now, lead).scaling
    spec = model.spec.model_copy(update={"replicas": record.replicas})
    status = model.status.model_copy(update={"scaling": record})
    look = next_look_seconds(policy, observed.demands, record, now)
    return ScaledModel(model.model_copy(update={"spec": spec, "status": status}), look)


def is_autoscaled(job: RLJob) -> bool:
    return any(reward.autoscaling for reward in job.spec.rewards)


def runs_driver(pods: Iterable[Manifest]) -> bool:
    """Whether a head runs, which answers or should."""
    return any(_labels(pod).get(LABEL_ROLE) == HEAD and pod.get("status", {}).get("phase") == "Running" for pod in pods)


def read_demands(job: RLJob, observed: Observed, model: str) -> list[Demand]:
    """What a job will ask of a RewardModel: one for each of its rewards that names it; none without a driver."""
    if conditions.is_finished(job.status) or not runs_driver(find_pods(job, observed)):
        return []
    return [
        read_demand(f"{job.metadata.name}/{reward.name}", observed.driver, reward.name, driver_runs=True)
        for reward in job.spec.rewards
        if reward.reward_model_ref and reward.reward_model_ref.name == model
    ]


def measure_lead(pods: Iterable[Manifest]) -> float:
    """How long one of these Pods takes from its creation until it is ready, by those that are."""
    times = []
    for pod in filter(is_ready, pods):
        created = pod["metadata"].get("creationTimestamp")
        ready = next(c.get("lastTransitionTime") for c in pod["status"]["conditions"] if c["type"] == "Ready")
        if created and ready:
            times.append((datetime.fromisoformat(ready) - datetime.fromisoformat(created)).total_seconds())
    return min(max(statistics.median(times), MIN_LEAD_SECONDS), MAX_LEAD_SECONDS) if times else LEAD_SECONDS


def scaling_events(old: Sequence[RewardScaling], new: Sequence[RewardScaling]) -> tuple[Event, ...]:
    """Of each reward whose replicas changed."""
    before = {record.name: record for record in old}
    events: list[Event] = []
    for record in new:
        events += derive_scaling_events(before.get(record.name), record, f"reward {record.name}")
    return tuple(events)


def _with_records(job: RLJob, records: list[RewardScaling]) -> RLJob:
    return job.model_copy(update={"status": job.status.model_copy(update={"scaling": records})})


def _labels(pod: Manifest) -> dict[str, str]:
    return pod["metadata"].get("labels") or {}
