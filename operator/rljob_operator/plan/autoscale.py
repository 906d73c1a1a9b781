"""How many replicas a reward needs, before its burst comes. Pure: what drivers say goes in, a decision comes out.

Little's law: slots = samples of a step x seconds of one / time in which they shall be scored; lateness corrects it
upwards while the step runs. Owns the rules of growing and shrinking. Leaves asking drivers and applying to its callers.
Invariants: never above maxReplicas; what an open step asked for is not taken from it; equal arguments give equal
decisions, and a world at rest an unchanged record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_api.manifest.scaling import Autoscaling, RewardScaling
from rljob_api.wire.protocol import DriverStatus, RewardDemand
from rljob_operator.backend import Event

TOLERANCE = 0.1
"""Replicas stay while demand is within this share of them: latency is measured anew in each step, and is never twice
the same."""
LEAD_SECONDS = 60.0
"""How long before a collection its Pods are asked for, while it is not known how long one takes to start."""
MIN_LEAD_SECONDS, MAX_LEAD_SECONDS = 10.0, 900.0
_GROWTHS_A_LEAD = 6
"""Most growths inside a step in the time that a Pod takes to start: while a reward is new, each look knows more."""
POLL_SECONDS = 2.0
"""How often a driver is asked while a reward of its job is autoscaled: of a generation of a minute, 10 s would be a
sixth in which no Pod starts."""
FAR_SECONDS = 10.0
"""How often it is asked while its next collection is further off than that, or none is to come."""
_SHORTEST_SECONDS = 1e-3
REASON_UP, REASON_DOWN = "ScaledUp", "ScaledDown"


@dataclass(frozen=True)
class Policy:
    """What the user chose."""

    name: str
    autoscaling: Autoscaling
    slots: int
    """Of one Pod."""


@dataclass(frozen=True)
class Demand:
    """What one job will ask of the reward."""

    job: str
    said: RewardDemand | None
    """None: its driver runs and does not answer, so nobody knows."""


@dataclass(frozen=True)
class Decision:
    """What should be. `scaling` is the record to store; the one that was given where nothing has changed."""

    scaling: RewardScaling
    slots: float
    """Asked for now."""
    message: str
    """Why, in words, now. The record's own is of the time when the replicas changed."""

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
    words: str = ""


def decide(
    policy: Policy,
    demands: Sequence[Demand],
    last: RewardScaling | None,
    now: datetime,
    lead_seconds: float = LEAD_SECONDS,
) -> Decision:
    """Replicas for now. `last`: the record of the decision before; None: there was none."""
    settings = policy.autoscaling
    needs = [_need(policy, demand.said, last, now, lead_seconds) for demand in demands if demand.said]
    needs = [need for need in needs if need.slots > 0]
    slots = sum(need.slots for need in needs)
    wanted = math.ceil(round(slots / policy.slots, 6)) + settings.spare_replicas if needs else 0
    bounded = min(max(wanted, settings.min_replicas), settings.max_replicas)
    message = _describe(policy, needs, slots, wanted, bounded)
    record = last or RewardScaling(name=policy.name)
    replicas, record = _move(policy, demands, record, wanted, bounded, now, lead_seconds)
    if replicas != bounded and replicas < (last.replicas if last else 0):
        seconds = settings.scale_down_after_seconds
        message = f"wants {replicas}: the most that was asked for in the last {_show(seconds)} s"
    if last is None or replicas != last.replicas:
        record = _record_change(record, demands, needs, slots, replicas, message, now)
    return Decision(record, slots, message)


def _move(
    policy: Policy,
    demands: Sequence[Demand],
    last: RewardScaling,
    wanted: int,
    bounded: int,
    now: datetime,
    lead_seconds: float,
) -> tuple[int, RewardScaling]:
    """Replicas from the last ones towards those that are wanted, and the record with what stabilisation remembers."""
    settings, current = policy.autoscaling, last.replicas
    least, most = settings.min_replicas, settings.max_replicas
    clamped = min(max(current, least), most)
    if clamped != current:  # the user moved the bounds
        return clamped if bounded <= clamped else bounded, _forget(last)
    grows = bounded > current * (1 + TOLERANCE)
    if grows and current and not _has_had_its_time(last, now, lead_seconds / _GROWTHS_A_LEAD):
        return current, _forget(last)
    if any(demand.said is None for demand in demands):
        return (bounded if grows else current), last
    if grows:
        return bounded, _forget(last)
    # Within the tolerance it stays, but for rest: there the user's own minimum counts.
    if bounded >= current or (wanted > 0 and bounded >= current * (1 - TOLERANCE)):
        return current, _forget(last)
    since = min(last.below_since or now, now)
    peak = max(bounded, last.below_peak if last.below_since else 0)
    if (now - since).total_seconds() >= settings.scale_down_after_seconds and _may_shrink(demands, since, now):
        return peak, _forget(last)
    return current, last.model_copy(update={"below_since": since, "below_peak": peak})


def _may_shrink(demands: Sequence[Demand], since: datetime, now: datetime) -> bool:
    """Whether what goes is no open step's. Of a lone job: between its steps. Where steps of several jobs overlap there
    may be no such moment, so those steps count that began when fewer had been enough already."""
    ages = [demand.said.elapsed_seconds for demand in demands if demand.said and demand.said.is_open]
    if not ages:
        return True
    return len(demands) > 1 and all(now - timedelta(seconds=age) > since for age in ages)


def _forget(last: RewardScaling) -> RewardScaling:
    """Nothing is on its way down."""
    return last.model_copy(update={"below_since": None, "below_peak": 0}) if last.below_since else last


def _need(
    policy: Policy, said: RewardDemand | None, last: RewardScaling | None, now: datetime, lead_seconds: float
) -> _Need:
    """Slots for one job's collection, under way or about to begin."""
    # What comes before Pods could go and come back is demand already.
    horizon = max(lead_seconds, policy.autoscaling.scale_down_after_seconds)
    if said is None or said.samples == 0 or (not said.is_open and said.starts_in_seconds > horizon):
        return _Need(0.0)
    latency, target = _latency(said, last), _target(policy, said, last)
    if not latency or not target:
        what = "how long one takes" if not latency else "how soon they are wanted"
        words = f"{said.samples} samples, and {what} is not known yet"
        return _Need(float(policy.slots), said.samples, latency, target, words)
    # No sample takes less than its own time, so no more slots than samples can help.
    busy = max(target * policy.autoscaling.utilization, latency)
    slots = min(float(said.samples), said.samples * latency / busy)
    words = f"{said.samples} samples x {_show(latency)} s / {_show(busy)} s"
    late = _catch_up(policy, said, latency, target)
    if said.is_open and late > slots and _has_had_its_time(last, now, lead_seconds):
        words = f"{said.expected} samples still to score x {_show(latency)} s, late"
        slots = late
    return _Need(slots, said.samples, latency, target, words)


def _catch_up(policy: Policy, said: RewardDemand, latency: float, target: float) -> float:
    """Slots that score the rest in time: more than were planned when replicas died or never came, or when the scorer
    has become slow. What is late already takes its own time anyway, so no less than that is aimed at."""
    due = policy.autoscaling.target_seconds or max(said.due_seconds or 0.0, target)
    shortest = max(latency, said.latency_p95_seconds or 0.0)
    return min(float(said.expected), said.expected * latency / max(due - said.elapsed_seconds, shortest))


def _has_had_its_time(last: RewardScaling | None, now: datetime, seconds: float) -> bool:
    """Whether the last change is so old. Until the Pods asked for last should be there, lateness says nothing about
    their number."""
    return not is_recent(last, now, seconds)


def is_recent(last: RewardScaling | None, now: datetime, seconds: float) -> bool:
    """Whether replicas changed in the last `seconds`. A change that is to come was written by a clock that was ahead,
    such as an earlier leader's."""
    if last is None or last.last_scale_time is None:
        return False
    return 0 <= (now - last.last_scale_time).total_seconds() < seconds


def _latency(said: RewardDemand, last: RewardScaling | None) -> float | None:
    """Mean seconds of a sample: this driver's, else what the reward took before, else what the oldest has taken."""
    known = _learn(said, said.latency_seconds, last.latency_seconds if last else None)
    if known is not None:
        return max(known, _SHORTEST_SECONDS)
    if said.in_flight <= said.waiting or said.oldest_in_flight_seconds <= 0:
        return None
    # By powers of two: it grows from look to look, and each change of the replicas is told.
    return 2.0 ** math.floor(math.log2(said.oldest_in_flight_seconds))


def _target(policy: Policy, said: RewardDemand, last: RewardScaling | None) -> float | None:
    if policy.autoscaling.target_seconds is not None:
        return policy.autoscaling.target_seconds
    known = _learn(said, said.window_seconds, last.target_seconds if last else None)
    return None if known is None else max(known, _SHORTEST_SECONDS)  # it is 0 when all samples come at the very end


def _learn(said: RewardDemand, told: float | None, before: float | None) -> float | None:
    """A driver's own figure, or the record's while it has none. In its first collection it knows the quick samples
    alone, and no update: then the longer of the two."""
    if told is None or before is None:
        return before if told is None else told
    return max(told, before) if said.is_first else told


def _record_change(
    record: RewardScaling,
    demands: Sequence[Demand],
    needs: Sequence[_Need],
    slots: float,
    replicas: int,
    message: str,
    now: datetime,
) -> RewardScaling:
    """The record of a change, with its inputs. What is not known now stays what it was. At the end nothing is asked
    for, but drivers still know how long one took, and the next job begins with that."""
    samples = sum(need.samples for need in needs)
    latencies = [(need.samples, need.latency) for need in needs]
    targets = [(need.samples, need.target) for need in needs]
    if not needs:
        known = [demand.said for demand in demands if demand.said and not demand.said.is_first]
        latencies = [(1, said.latency_seconds) for said in known]
        targets = [(1, said.window_seconds) for said in known]
    latency, target = _weighted(latencies), _weighted(targets)
    return record.model_copy(
        update={
            "replicas": replicas,
            "slots": math.ceil(round(slots, 6)),
            "samples": samples,
            "latency_seconds": _round(latency) if latency else record.latency_seconds,
            "target_seconds": _round(target) if target else record.target_seconds,
            "message": message,
            "last_scale_time": now,
        }
    )


def _weighted(values: Sequence[tuple[int, float | None]]) -> float | None:
    known = [(weight, value) for weight, value in values if value]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None


def _describe(policy: Policy, needs: Sequence[_Need], slots: float, wanted: int, bounded: int) -> str:
    """'wants 33: 5120 samples x 20.5 s / 201 s = 523 slots of 16'."""
    settings = policy.autoscaling
    if not needs:
        words = "nothing is to be scored"
        return f"wants {bounded}: {words}" + (", and minReplicas keeps them" if bounded else "")
    if len(needs) == 1:
        sums = f"{needs[0].words} = {math.ceil(round(slots, 6))} slots of {policy.slots}"
    else:
        parts = " + ".join(str(math.ceil(round(need.slots, 6))) for need in needs)
        sums = f"{len(needs)} jobs need {parts} slots of {policy.slots}"
    spare = f", + {settings.spare_replicas} spare" if settings.spare_replicas else ""
    limit = ""
    if bounded < wanted:
        limit = f"; maxReplicas is {bounded}"
    elif bounded > wanted:
        limit = f"; minReplicas is {bounded}"
    return f"wants {wanted}: {sums}{spare}{limit}"


def _show(seconds: float) -> str:
    return f"{seconds:.3g}"


def _round(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def next_look_seconds(policy: Policy, demands: Sequence[Demand], record: RewardScaling, now: datetime) -> float | None:
    """When to ask and decide again; None: only when something changes."""
    waits = []
    if record.below_since is not None:
        passed = (now - record.below_since).total_seconds()
        waits.append(max(1.0, policy.autoscaling.scale_down_after_seconds - passed))
    if demands:
        is_near = any(
            demand.said is None or (demand.said.samples and demand.said.starts_in_seconds < FAR_SECONDS)
            for demand in demands
        )
        waits.append(POLL_SECONDS if is_near else FAR_SECONDS)
    return min(waits, default=None)


def derive_scaling_events(last: RewardScaling | None, new: RewardScaling | None, path: str) -> tuple[Event, ...]:
    """One for each change of the replicas; the first decision of all is none."""
    if last is None or new is None or new.replicas == last.replicas:
        return ()
    reason = REASON_UP if new.replicas > last.replicas else REASON_DOWN
    return (Event("Normal", reason, f"{path} from {last.replicas} to {new.replicas} Pods: {new.message}"),)


def read_demand(job: str, driver: DriverStatus | None, reward: str, driver_runs: bool) -> Demand:
    """What a job's driver says of one of its rewards. Without a driver nothing is asked for."""
    if driver is None:
        return Demand(job, None if driver_runs else RewardDemand())
    return Demand(job, driver.demand.get(reward) or RewardDemand())
