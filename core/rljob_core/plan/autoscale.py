"""The number of replicas that a reward or a service of an agent needs, before its samples arrive. Pure: reports of
drivers in, a decision out.

Little's law: slots = samples of a step x seconds per sample / target time. Lateness corrects it upwards during the
step. An episode holds its slot in a runner: slots = episodes in flight, unless the user set the target time. Owns the
rules of scaling up and down; leaves requests to drivers and applying to its callers. Invariants: never above
maxReplicas; an open step keeps the Pods that it requested; equal arguments give equal decisions, and an idle reward
keeps its record.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_api.manifest.scaling import Autoscaling, RewardScaling
from rljob_api.wire.driver_status import DriverStatus, RewardDemand
from rljob_core.backend import DEMAND_POLL_SECONDS, Demand, Event

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
    """The user's settings for one reward or service of an agent."""

    name: str
    autoscaling: Autoscaling
    slots: int
    """Per Pod."""
    samples: str = "samples"
    """What it counts, in messages."""


@dataclass(frozen=True)
class _Need:
    """One job's part of the slots."""

    slots: float
    samples: int
    latency: float | None
    target: float | None
    explanation: str


def decide_replicas(
    policy: ScalingPolicy,
    demands: Sequence[Demand],
    last: RewardScaling | None,
    now: datetime,
    lead_seconds: float = LEAD_SECONDS,
) -> RewardScaling:
    """The record of the replicas now. `last` is that of the previous decision, and of an unchanged one; None: there was
    none."""
    return _Decision(policy, [demand.reported for demand in demands], last, now, lead_seconds).decide()


@dataclass(frozen=True)
class _Decision:
    policy: ScalingPolicy
    reports: Sequence[RewardDemand | None]
    last: RewardScaling | None
    now: datetime
    lead_seconds: float

    @property
    def known(self) -> list[RewardDemand]:
        return [report for report in self.reports if report]

    def decide(self) -> RewardScaling:
        settings, last = self.policy.autoscaling, self.last
        needs = [need for need in map(self._need, self.known) if need]
        slots = sum(need.slots for need in needs)
        desired = max(1, _ceil(slots / self.policy.slots)) + settings.spare_replicas if needs else 0
        bounded = min(max(desired, settings.min_replicas), settings.max_replicas)
        record = last or RewardScaling(name=self.policy.name)
        replicas, record = self._choose_replicas(record, desired, bounded)
        if last is not None and replicas == last.replicas:
            return record
        message = _describe(self.policy, needs, desired, bounded)
        if replicas != bounded and last is not None and replicas < last.replicas:
            seconds = _show(settings.scale_down_after_seconds)
            message = f"wants {replicas}: peak demand of the last {seconds} s (stabilization window)"
        return self._record_change(record, needs, replicas, message)

    def _choose_replicas(self, last: RewardScaling, desired: int, bounded: int) -> tuple[int, RewardScaling]:
        """The next replicas, between the last and the desired ones, and the record with the pending scale-down."""
        settings, current = self.policy.autoscaling, last.replicas
        clamped = min(max(current, settings.min_replicas), settings.max_replicas)
        if clamped != current:  # the user changed the bounds
            return clamped if bounded <= clamped else bounded, _clear_scale_down(last)
        grows = bounded > current * (1 + TOLERANCE)
        if grows and current and is_recent(last, self.now, self.lead_seconds / _MAX_SCALE_UPS_PER_LEAD):
            return current, _clear_scale_down(last)
        if None in self.reports:
            return (bounded if grows else current), last
        if grows:
            return bounded, _clear_scale_down(last)
        # The tolerance applies only while there is demand; without demand minReplicas is exact.
        if bounded >= current or (desired > 0 and bounded >= current * (1 - TOLERANCE)):
            return current, _clear_scale_down(last)
        since = min(last.below_since or self.now, self.now)
        peak = max(bounded, last.below_peak if last.below_since else 0)
        if (self.now - since).total_seconds() >= settings.scale_down_after_seconds and self._may_scale_down(since):
            return peak, _clear_scale_down(last)
        return current, last.model_copy(update={"below_since": since, "below_peak": peak})

    def _may_scale_down(self, since: datetime) -> bool:
        """Whether no open step needs the surplus Pods. A single job scales down between its steps. The steps of several
        jobs may always overlap; there it suffices that all of them began after the demand had become lower."""
        ages = [report.elapsed_seconds for report in self.known if report.is_open]
        started_later = all(self.now - timedelta(seconds=age) > since for age in ages)
        return not ages or (len(self.reports) > 1 and started_later)

    def _need(self, reported: RewardDemand) -> _Need | None:
        """Slots for the current or next collection of one job; None: there is none soon."""
        # A collection that begins before Pods could be removed and started again is demand already.
        horizon = max(self.lead_seconds, self.policy.autoscaling.scale_down_after_seconds)
        if reported.samples == 0 or (not reported.is_open and reported.starts_in_seconds > horizon):
            return None
        latency, target = self._latency(reported), self._target(reported)
        samples = f"{reported.samples} {self.policy.samples}"
        if reported.holds_slots and self.policy.autoscaling.target_seconds is None:
            return _Need(float(reported.samples), reported.samples, latency, target, f"{samples} at once")
        if not latency or not target:
            missing = "target" if latency else "latency"
            explanation = f"{samples}; {missing} not measured yet"
            return _Need(float(self.policy.slots), reported.samples, latency, target, explanation)
        # No sample takes less than its latency, so more slots than samples do not help.
        busy = max(target * self.policy.autoscaling.utilization, latency)
        slots = min(float(reported.samples), reported.samples * latency / busy)
        explanation = f"{samples} x {_show(latency)} s / {_show(busy)} s"
        late = self._slots_to_catch_up(reported, latency, target)
        # Lateness says nothing about the number of Pods while some start.
        if reported.is_open and late > slots and not is_recent(self.last, self.now, self.lead_seconds):
            explanation = f"{reported.expected} {self.policy.samples} still open x {_show(latency)} s, late"
            slots = late
        return _Need(slots, reported.samples, latency, target, explanation)

    def _slots_to_catch_up(self, reported: RewardDemand, latency: float, target: float) -> float:
        """Slots that score the rest in time: more than planned if replicas failed or the scorer became slower. The time
        left never counts as less than the latency of one sample."""
        due = self.policy.autoscaling.target_seconds or max(reported.due_seconds or 0.0, target)
        shortest = max(latency, reported.latency_p95_seconds or 0.0)
        time_left = max(due - reported.elapsed_seconds, shortest)
        return min(float(reported.expected), reported.expected * latency / time_left)

    def _latency(self, reported: RewardDemand) -> float | None:
        """Mean seconds per sample: measured by this driver, else recorded, else the age of the oldest request."""
        known = _combine_estimates(reported, reported.latency_seconds, self.last.latency_seconds if self.last else None)
        if known is not None:
            return max(known, _MIN_SECONDS)
        if reported.in_flight <= reported.waiting or reported.oldest_in_flight_seconds <= 0:
            return None
        # The age grows all the time, and every change of replicas emits an event: round it to powers of two.
        return 2.0 ** math.floor(math.log2(reported.oldest_in_flight_seconds))

    def _target(self, reported: RewardDemand) -> float | None:
        if self.policy.autoscaling.target_seconds is not None:
            return self.policy.autoscaling.target_seconds
        known = _combine_estimates(reported, reported.window_seconds, self.last.target_seconds if self.last else None)
        return None if known is None else max(known, _MIN_SECONDS)  # 0 when all samples arrive at the end of generation

    def _record_change(
        self, record: RewardScaling, needs: Sequence[_Need], replicas: int, message: str
    ) -> RewardScaling:
        """The record of a change, with its inputs. Unknown ones keep their value. At the end of a job there is no need,
        but drivers still report the latency, which the next job starts with."""
        estimates = [(need.samples, need.latency, need.target) for need in needs]
        if not needs:
            estimates = [
                (1, report.latency_seconds, report.window_seconds) for report in self.known if not report.is_first
            ]
        return record.model_copy(
            update={
                "replicas": replicas,
                "slots": _ceil(sum(need.slots for need in needs)),
                "samples": sum(need.samples for need in needs),
                "latency_seconds": _weighted_mean((w, latency) for w, latency, _ in estimates)
                or record.latency_seconds,
                "target_seconds": _weighted_mean((w, target) for w, _, target in estimates) or record.target_seconds,
                "message": message,
                "last_scale_time": self.now,
            }
        )


def is_recent(last: RewardScaling | None, now: datetime, seconds: float) -> bool:
    """Whether replicas changed in the last `seconds`. A change in the future was written by a clock that was ahead,
    such as an earlier leader's, and does not count."""
    if last is None or last.last_scale_time is None:
        return False
    return 0 <= (now - last.last_scale_time).total_seconds() < seconds


def _clear_scale_down(last: RewardScaling) -> RewardScaling:
    """The record without a pending scale-down."""
    return last.model_copy(update={"below_since": None, "below_peak": 0}) if last.below_since else last


def _combine_estimates(reported: RewardDemand, measured: float | None, recorded: float | None) -> float | None:
    """The driver's measurement, else the record. In its first collection a driver has measured only the fastest
    samples and no update; then the larger of the two."""
    if measured is None or recorded is None:
        return recorded if measured is None else measured
    return max(measured, recorded) if reported.is_first else measured


def _weighted_mean(values: Iterable[tuple[int, float | None]]) -> float | None:
    """The mean of the known values, rounded as in messages."""
    known = [(weight, value) for weight, value in values if value]
    total = sum(weight for weight, _ in known)
    return float(_show(sum(weight * value for weight, value in known) / total)) if total else None


def _describe(policy: ScalingPolicy, needs: Sequence[_Need], desired: int, bounded: int) -> str:
    """'wants 33: 5120 samples x 20.5 s / 201 s = 523 slots of 16'."""
    settings = policy.autoscaling
    if not needs:
        return f"wants {bounded}: no {policy.samples} expected" + (", minReplicas applies" if bounded else "")
    if len(needs) == 1:
        sums = f"{needs[0].explanation} = {_ceil(needs[0].slots)} slots of {policy.slots}"
    else:
        parts = " + ".join(str(_ceil(need.slots)) for need in needs)
        sums = f"{len(needs)} jobs need {parts} slots of {policy.slots}"
    spare = f", + {settings.spare_replicas} spare" if settings.spare_replicas else ""
    limit = "" if bounded == desired else f"; {'max' if bounded < desired else 'min'}Replicas is {bounded}"
    return f"wants {desired}: {sums}{spare}{limit}"


def _ceil(value: float) -> int:
    """Rounded up, except for errors of floating-point sums."""
    return math.ceil(round(value, 6))


def _show(seconds: float) -> str:
    return f"{seconds:.3g}"


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


def read_demand(job: str, driver: DriverStatus | None, reward: str) -> Demand:
    """The demand for one reward that a job's running driver reports; unknown if it does not answer."""
    return Demand(job, driver.demand.get(reward, RewardDemand()) if driver else None)
