"""Ways to choose replicas: RLJob's autoscaler, the HorizontalPodAutoscaler as documented, or a fixed number."""

from __future__ import annotations

import math
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from rljob_api.manifest.scaling import Autoscaling, RewardScaling
from rljob_core.backend import DEMAND_POLL_SECONDS
from rljob_core.plan.autoscale import LEAD_SECONDS, ScalingPolicy, decide_replicas

if TYPE_CHECKING:
    from autoscale.simulation import Simulation

_MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)


class RLJobScaler:
    """The operator's decision, from the drivers' demand."""

    interval_seconds = DEMAND_POLL_SECONDS

    def __init__(self, settings: Autoscaling, slots: int) -> None:
        self.first_replicas = settings.min_replicas
        self._policy = ScalingPolicy("reward", settings, slots)
        self._record: RewardScaling | None = None
        self.decisions: list[tuple[float, str]] = []

    def decide(self, now: float, simulation: Simulation) -> int:
        moment = _MIDNIGHT + timedelta(seconds=now)
        record = decide_replicas(self._policy, simulation.demands(), self._record, moment, LEAD_SECONDS)
        if self._record is None or record.replicas != self._record.replicas:
            self.decisions.append((now, record.message))
        self._record = record
        return record.replicas


class HorizontalPodAutoscaler:
    """autoscaling/v2 on CPU with its defaults: every 15 s, ceil(replicas x utilization / target), tolerance 10%.

    It scales up by at most 100% or 4 Pods in 15 s, and down to the highest recommendation of the last 5 minutes. When
    scaling up, unready Pods count as idle. `cores`: CPU of one executing request, 1 if it computes, almost 0 if it
    waits for a judge or a sandbox. In its favour, metrics have no delay except for their window of 15 s.
    """

    interval_seconds = 15.0
    _TARGET, _TOLERANCE, _STABLE_SECONDS = 0.7, 0.1, 300.0

    def __init__(self, min_replicas: int, max_replicas: int, slots: int, cores: float) -> None:
        self.first_replicas, self._cores = min_replicas, cores
        self._min_replicas, self._max_replicas, self._slots = min_replicas, max_replicas, slots
        self._recommended: deque[tuple[float, int]] = deque()
        self._busy_before, self._decided_at = 0.0, 0.0

    def decide(self, now: float, simulation: Simulation) -> int:
        current = max(1, simulation.desired)
        window = now - self._decided_at
        busy = self._cores * (simulation.busy_slot_seconds - self._busy_before) / window if window > 0 else 0.0
        self._busy_before, self._decided_at = simulation.busy_slot_seconds, now
        wanted = self._recommend(current, busy, simulation.num_ready)
        wanted = min(wanted, max(2 * current, current + 4))
        wanted = min(max(wanted, self._min_replicas), self._max_replicas)
        self._recommended.append((now, wanted))
        while self._recommended[0][0] < now - self._STABLE_SECONDS:
            self._recommended.popleft()
        return max(wanted, min(current, max(value for _, value in self._recommended)))

    def _recommend(self, current: int, busy: float, ready: int) -> int:
        if not ready:
            return current
        ratio = busy / (ready * self._slots) / self._TARGET
        if ratio > 1 and ready < current:  # recompute with starting Pods as idle
            ratio = max(1.0, busy / (current * self._slots) / self._TARGET)
            return current if ratio <= 1 + self._TOLERANCE else math.ceil(ratio * current)
        if abs(ratio - 1) <= self._TOLERANCE:
            return current
        return math.ceil(ratio * ready)


class FixedScaler:
    """A fixed number of replicas."""

    interval_seconds = 3600.0

    def __init__(self, replicas: int) -> None:
        self.first_replicas = replicas

    def decide(self, now: float, simulation: Simulation) -> int:
        return self.first_replicas
