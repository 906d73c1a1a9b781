"""What the client of a service has measured: the facts from which its demand is predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_api.wire.base import Lane


@dataclass(frozen=True)
class CallTotals:
    """Totals of one lane, since the driver started."""

    num_calls: int = 0
    """Those with a result."""
    busy_seconds: float = 0.0
    """Their executions, retries included."""
    wait_seconds: float = 0.0
    """What else they took, and for how long the present waits for a replica have lasted."""

    def since(self, earlier: CallTotals) -> CallTotals:
        return CallTotals(
            self.num_calls - earlier.num_calls,
            self.busy_seconds - earlier.busy_seconds,
            max(0.0, self.wait_seconds - earlier.wait_seconds),
        )


@dataclass(frozen=True)
class ServiceLoad:
    holds_slots: bool = False
    """Whether a call lasts for a whole episode: it is a runner."""
    in_flight: int = 0
    """Calls without a result, and readers of a tool's functions that wait for a replica."""
    waiting: int = 0
    """Those of them that no replica has."""
    oldest_in_flight_seconds: float = 0.0
    """Age of the oldest of the others on its replica."""
    latency_seconds: float | None = None
    """Mean execution time of recent calls."""
    latency_p95_seconds: float | None = None
    totals: Mapping[Lane, CallTotals] = field(default_factory=dict)

    def total(self, lane: Lane) -> CallTotals:
        return self.totals.get(lane, CallTotals())
