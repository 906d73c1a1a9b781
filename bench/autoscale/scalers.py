"""Who decides on replicas: ours, the HorizontalPodAutoscaler as documented, or nobody."""

from __future__ import annotations

import math
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from rljob_api.manifest.scaling import Autoscaling, RewardScaling
from rljob_operator.plan.autoscale import LEAD_SECONDS, POLL_SECONDS, Policy, decide

if TYPE_CHECKING:
    from autoscale.simulation import World

_MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)


class Ours:
    """The operator's own decision, by the drivers' own demand."""

    interval_seconds = POLL_SECONDS

    def __init__(self, settings: Autoscaling, slots: int) -> None:
        self.first_replicas = settings.min_replicas
        self._policy = Policy("reward", settings, slots)
        self._record: RewardScaling | None = None
        self.said: list[tuple[float, str]] = []

    def decide(self, now: float, world: World) -> int:
        moment = _MIDNIGHT + timedelta(seconds=now)
        decision = decide(self._policy, world.demands(), self._record, moment, LEAD_SECONDS)
        if self._record is None or decision.replicas != self._record.replicas:
            self.said.append((now, decision.message))
        self._record = decision.scaling
        return decision.replicas


class HorizontalPodAutoscaler:
    """autoscaling/v2 on CPU with its defaults: every 15 s, ceil(replicas x utilization / target) outside a tolerance of
    10 %; up by at most 100 % or 4 Pods in 15 s; down to the highest recommendation of the last 5 minutes; Pods that are
    not ready count as idle where it would grow. `cores` is what one executing request uses of its slot's core: 1 for
    one that computes, next to nothing for one that waits for a judge or a sandbox. In its favour, metrics have no delay
    but their window of 15 s."""

    interval_seconds = 15.0
    _TARGET, _TOLERANCE, _STABLE_SECONDS = 0.7, 0.1, 300.0

    def __init__(self, least: int, most: int, slots: int, cores: float) -> None:
        self.first_replicas, self._cores = least, cores
        self._least, self._most, self._slots = least, most, slots
        self._recommended: deque[tuple[float, int]] = deque()
        self._busy_before, self._looked_at = 0.0, 0.0

    def decide(self, now: float, world: World) -> int:
        current = max(1, world.desired)
        window = now - self._looked_at
        busy = self._cores * (world.busy_slot_seconds - self._busy_before) / window if window > 0 else 0.0
        self._busy_before, self._looked_at = world.busy_slot_seconds, now
        wanted = self._recommend(current, busy, world.num_ready)
        wanted = min(wanted, max(2 * current, current + 4))
        wanted = min(max(wanted, self._least), self._most)
        self._recommended.append((now, wanted))
        while self._recommended[0][0] < now - self._STABLE_SECONDS:
            self._recommended.popleft()
        return max(wanted, min(current, max(value for _, value in self._recommended)))

    def _recommend(self, current: int, busy: float, ready: int) -> int:
        if not ready:
            return current
        ratio = busy / (ready * self._slots) / self._TARGET
        if ratio > 1 and ready < current:  # again, with those that start as idle
            ratio = max(1.0, busy / (current * self._slots) / self._TARGET)
            return current if ratio <= 1 + self._TOLERANCE else math.ceil(ratio * current)
        if abs(ratio - 1) <= self._TOLERANCE:
            return current
        return math.ceil(ratio * ready)


class Fixed:
    """As many all day."""

    interval_seconds = 3600.0

    def __init__(self, replicas: int) -> None:
        self.first_replicas = replicas

    def decide(self, now: float, world: World) -> int:
        return self.first_replicas
