"""The number of replicas that a reward needs, before its samples arrive. Pure: drivers' reports in, a decision out.

Little's law: slots = samples of a step x seconds per sample / target time. Lateness corrects it upwards during the
step. Owns the rules of scaling up and down; leaves requests to drivers and applying to its callers. Invariants: never
above maxReplicas; an open step keeps the Pods that it requested; equal arguments give equal decisions, and an idle
reward keeps its record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_api.manifest.scaling import Autoscaling, RewardScaling
from rljob_api.wire.protocol import DriverStatus, RewardDemand
from rljob_operator.backend import DEMAND_POLL_SECONDS, Demand, Event

TOLERANCE = 0.1
"""Replicas stay while demand differs by less than this share: each step measures a slightly different latency."""
LEAD_SECONDS = 60.0
"""How long before a collection its Pods are requested, while their startup time is unknown."""
MIN_LEAD_SECONDS, MAX_LEAD_SECONDS = 10.0, 900.0
_MAX_SCALE_UPS_PER_LEAD = 6
"""Within the startup time of a Pod. For a new reward each report of the driver has a better estimate."""
IDLE_POLL_SECONDS = 10.0
"""How often the driver is polled while its next collection is further away than that, or there is none."""
_MIN_SECONDS = 1e-3
REASON_UP, REASON_DOWN = "ScaledUp", "ScaledDown"


@dataclass(frozen=True)
class ScalingPolicy:
    """The user's settings for one reward."""

    name: str
    autoscaling: Autoscaling
    slots: int
    """Per Pod."""


@dataclass(frozen=True)
class Decision:
    """The desired replicas. `scaling` is the record to store; an unchanged decision keeps the given record."""

    scaling: RewardScaling
    slots: float
    """Needed now."""
    message: str
    """Why, now. The message of the record is from the last change of replicas."""

    @property
    def replicas(self) -> int:
        return self.scaling.replicas


@dataclass(frozen=True)
class _Need:
    """One job's part of the slots."""

    slots: float
    samples: int = 0
    latency: float | None = None
    target: float | None = None
    explanation: str = ""


def decide_replicas(
    policy: ScalingPolicy,
    demands: Sequence[Demand],
    last: RewardScaling | None,
    now: datetime,
    lead_seconds: float = LEAD_SECONDS,
) -> Decision:
    """Replicas now. `last` is the record of the previous decision; None: there was none."""
    settings = policy.autoscaling
    needs = [_need(policy, demand.reported, last, now, lead_seconds) for demand in demands if demand.reported]
    needs = [need for need in needs if need.slots > 0]
    slots = sum(need.slots for need in needs)
    desired = math.ceil(round(slots / policy.slots, 6)) + settings.spare_replicas if needs else 0
    bounded = min(max(desired, settings.min_replicas), settings.max_replicas)
    message = _describe(policy, needs, slots, desired, bounded)
    record = last or RewardScaling(name=policy.name)
    replicas, record = _choose_replicas(policy, demands, record, desired, bounded, now, lead_seconds)
    if replicas != bounded and replicas < (last.replicas if last else 0):
        seconds = _show(settings.scale_down_after_seconds)
        message = f"wants {replicas}: peak demand of the last {seconds} s (stabilization window)"
    if last is None or replicas != last.replicas:
        record = _record_change(record, demands, needs, slots, replicas, message, now)
    return Decision(record, slots, message)


def _choose_replicas(
    policy: ScalingPolicy,
    demands: Sequence[Demand],
    last: RewardScaling,
    desired: int,
    bounded: int,
    now: datetime,
    lead_seconds: float,
) -> tuple[int, RewardScaling]:
    """The next replicas, between the last and the desired ones, and the record with the pending scale-down."""
    settings, current = policy.autoscaling, last.replicas
    clamped = min(max(current, settings.min_replicas), settings.max_replicas)
    if clamped != current:  # the user changed the bounds
        return clamped if bounded <= clamped else bounded, _clear_scale_down(last)
    grows = bounded > current * (1 + TOLERANCE)
    if grows and current and not _is_settled(last, now, lead_seconds / _MAX_SCALE_UPS_PER_LEAD):
        return current, _clear_scale_down(last)
    if any(demand.reported is None for demand in demands):
        return (bounded if grows else current), last
    if grows:
        return bounded, _clear_scale_down(last)
    # The tolerance applies only while there is demand; without demand minReplicas is exact.
    if bounded >= current or (desired > 0 and bounded >= current * (1 - TOLERANCE)):
        return current, _clear_scale_down(last)
    since = min(last.below_since or now, now)
    peak = max(bounded, last.below_peak if last.below_since else 0)
    if (now - since).total_seconds() >= settings.scale_down_after_seconds and _may_scale_down(demands, since, now):
        return peak, _clear_scale_down(last)
    return current, last.model_copy(update={"below_since": since, "below_peak": peak})


def _may_scale_down(demands: Sequence[Demand], since: datetime, now: datetime) -> bool:
    """Whether no open step needs the surplus Pods. A single job scales down between its steps. The steps of several
    jobs may always overlap; there it suffices that all of them began after the demand had become lower."""
    ages = [demand.reported.elapsed_seconds for demand in demands if demand.reported and demand.reported.is_open]
    if not ages:
        return True
    return len(demands) > 1 and all(now - timedelta(seconds=age) > since for age in ages)


def _clear_scale_down(last: RewardScaling) -> RewardScaling:
    """The record without a pending scale-down."""
    return last.model_copy(update={"below_since": None, "below_peak": 0}) if last.below_since else last


def _need(
    policy: ScalingPolicy,
    reported: RewardDemand,
    last: RewardScaling | None,
    now: datetime,
    lead_seconds: float,
) -> _Need:
    """Slots for the current or next collection of one job."""
    # A collection that begins before Pods could be removed and started again is demand already.
    horizon = max(lead_seconds, policy.autoscaling.scale_down_after_seconds)
    if reported.samples == 0 or (not reported.is_open and reported.starts_in_seconds > horizon):
        return _Need(0.0)
    latency, target = _latency(reported, last), _target(policy, reported, last)
    if not latency or not target:
        missing = "target" if latency else "latency"
        explanation = f"{reported.samples} samples; {missing} not measured yet"
        return _Need(float(policy.slots), reported.samples, latency, target, explanation)
    # No sample takes less than its latency, so more slots than samples do not help.
    busy = max(target * policy.autoscaling.utilization, latency)
    slots = min(float(reported.samples), reported.samples * latency / busy)
    explanation = f"{reported.samples} samples x {_show(latency)} s / {_show(busy)} s"
    late = _slots_to_catch_up(policy, reported, latency, target)
    if reported.is_open and late > slots and _is_settled(last, now, lead_seconds):
        explanation = f"{reported.expected} samples still to score x {_show(latency)} s, late"
        slots = late
    return _Need(slots, reported.samples, latency, target, explanation)


def _slots_to_catch_up(policy: ScalingPolicy, reported: RewardDemand, latency: float, target: float) -> float:
    """Slots that score the rest in time: more than planned if replicas failed or the scorer became slower. The time
    left never counts as less than the latency of one sample."""
    due = policy.autoscaling.target_seconds or max(reported.due_seconds or 0.0, target)
    shortest = max(latency, reported.latency_p95_seconds or 0.0)
    time_left = max(due - reported.elapsed_seconds, shortest)
    return min(float(reported.expected), reported.expected * latency / time_left)


def _is_settled(last: RewardScaling | None, now: datetime, seconds: float) -> bool:
    """Whether the last change is at least so old. Lateness says nothing about the number of Pods while some start."""
    return not is_recent(last, now, seconds)


def is_recent(last: RewardScaling | None, now: datetime, seconds: float) -> bool:
    """Whether replicas changed in the last `seconds`. A change in the future was written by a clock that was ahead,
    such as an earlier leader's, and does not count."""
    if last is None or last.last_scale_time is None:
        return False
    return 0 <= (now - last.last_scale_time).total_seconds() < seconds


def _latency(reported: RewardDemand, last: RewardScaling | None) -> float | None:
    """Mean seconds per sample: measured by this driver, else recorded, else the age of the oldest request."""
    known = _combine_estimates(reported, reported.latency_seconds, last.latency_seconds if last else None)
    if known is not None:
        return max(known, _MIN_SECONDS)
    if reported.in_flight <= reported.waiting or reported.oldest_in_flight_seconds <= 0:
        return None
    # The age grows all the time, and every change of replicas emits an event: round it to powers of two.
    return 2.0 ** math.floor(math.log2(reported.oldest_in_flight_seconds))


def _target(policy: ScalingPolicy, reported: RewardDemand, last: RewardScaling | None) -> float | None:
    if policy.autoscaling.target_seconds is not None:
        return policy.autoscaling.target_seconds
    known = _combine_estimates(reported, reported.window_seconds, last.target_seconds if last else None)
    return None if known is None else max(known, _MIN_SECONDS)  # 0 when all samples arrive at the end of generation


def _combine_estimates(reported: RewardDemand, measured: float | None, recorded: float | None) -> float | None:
    """The driver's measurement, else the record. In its first collection a driver has measured only the fastest
    samples and no update; then the larger of the two."""
    if measured is None or recorded is None:
        return recorded if measured is None else measured
    return max(measured, recorded) if reported.is_first else measured


def _record_change(
    record: RewardScaling,
    demands: Sequence[Demand],
    needs: Sequence[_Need],
    slots: float,
    replicas: int,
    message: str,
    now: datetime,
) -> RewardScaling:
    """The record of a change, with its inputs. Unknown ones keep their value. At the end of a job there is no need, but
    drivers still report the latency, which the next job starts with."""
    latencies = [(need.samples, need.latency) for need in needs]
    targets = [(need.samples, need.target) for need in needs]
    if not needs:
        known = [demand.reported for demand in demands if demand.reported and not demand.reported.is_first]
        latencies = [(1, reported.latency_seconds) for reported in known]
        targets = [(1, reported.window_seconds) for reported in known]
    latency, target = _weighted_mean(latencies), _weighted_mean(targets)
    return record.model_copy(
        update={
            "replicas": replicas,
            "slots": math.ceil(round(slots, 6)),
            "samples": sum(need.samples for need in needs),
            "latency_seconds": _round(latency) if latency else record.latency_seconds,
            "target_seconds": _round(target) if target else record.target_seconds,
            "message": message,
            "last_scale_time": now,
        }
    )


def _weighted_mean(values: Sequence[tuple[int, float | None]]) -> float | None:
    known = [(weight, value) for weight, value in values if value]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None


def _describe(policy: ScalingPolicy, needs: Sequence[_Need], slots: float, desired: int, bounded: int) -> str:
    """'wants 33: 5120 samples x 20.5 s / 201 s = 523 slots of 16'."""
    settings = policy.autoscaling
    if not needs:
        return f"wants {bounded}: no samples to score" + (", minReplicas applies" if bounded else "")
    if len(needs) == 1:
        sums = f"{needs[0].explanation} = {math.ceil(round(slots, 6))} slots of {policy.slots}"
    else:
        parts = " + ".join(str(math.ceil(round(need.slots, 6))) for need in needs)
        sums = f"{len(needs)} jobs need {parts} slots of {policy.slots}"
    spare = f", + {settings.spare_replicas} spare" if settings.spare_replicas else ""
    limit = ""
    if bounded < desired:
        limit = f"; maxReplicas is {bounded}"
    elif bounded > desired:
        limit = f"; minReplicas is {bounded}"
    return f"wants {desired}: {sums}{spare}{limit}"


def _show(seconds: float) -> str:
    return f"{seconds:.3g}"


def _round(seconds: float) -> float:
    return float(_show(seconds))


def next_decision_seconds(
    policy: ScalingPolicy, demands: Sequence[Demand], record: RewardScaling, now: datetime
) -> float | None:
    """When to poll and decide again; None: only after a change."""
    waits = []
    if record.below_since is not None:
        passed = (now - record.below_since).total_seconds()
        waits.append(max(1.0, policy.autoscaling.scale_down_after_seconds - passed))
    if demands:
        reports = [demand.reported for demand in demands]
        is_near = any(r is None or (r.samples and r.starts_in_seconds < IDLE_POLL_SECONDS) for r in reports)
        waits.append(DEMAND_POLL_SECONDS if is_near else IDLE_POLL_SECONDS)
    return min(waits, default=None)


def derive_scaling_events(last: RewardScaling | None, new: RewardScaling | None, path: str) -> tuple[Event, ...]:
    """One event per change of replicas, except for the first decision."""
    if last is None or new is None or new.replicas == last.replicas:
        return ()
    reason = REASON_UP if new.replicas > last.replicas else REASON_DOWN
    return (Event("Normal", reason, f"{path} from {last.replicas} to {new.replicas} Pods: {new.message}"),)


def read_demand(job: str, driver: DriverStatus | None, reward: str, has_driver: bool) -> Demand:
    """The demand for one reward that a job's driver reports. A job without a driver has none."""
    if driver is None:
        return Demand(job, None if has_driver else RewardDemand())
    return Demand(job, driver.demand.get(reward) or RewardDemand())
