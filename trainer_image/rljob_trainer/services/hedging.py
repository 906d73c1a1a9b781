"""Which requests get a second one, oldest first. Pure: requests and latencies come in, the caller passes the time.

Invariant: at most `max_percent` of all requests so far were hedged.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rljob_api.manifest.services.reward import Hedging

if TYPE_CHECKING:
    from rljob_trainer.replicas.pool import ReplicaLease

_MIN_LATENCIES = 20
"""A percentile of fewer latencies means nothing."""
_NUM_LATENCIES = 2048
"""Number of newest requests that define "unusually long", and over which an unused budget is kept."""


@dataclass(eq=False)
class InFlightRequest:
    """A request without a second one."""

    address: str
    sent_at: float
    second: asyncio.Future[ReplicaLease] = field(repr=False)
    """Set to the lease of the replica that gets the second request."""


class HedgeTracker:
    def __init__(self, hedging: Hedging) -> None:
        self.num_hedges = 0
        """Second requests that were sent."""
        self.num_wins = 0
        """Second requests that returned the result that counts."""
        self._hedging = hedging
        self._unhedged: dict[InFlightRequest, None] = {}
        """In order of sending."""
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self._budget_percent = 0.0
        """A request adds max_percent and a hedge takes 100, so that rounding loses nothing."""

    def record_sent(self, request: InFlightRequest) -> None:
        """`request` was sent; `sent_at` never decreases from one call to the next."""
        self._unhedged[request] = None
        share = self._hedging.max_percent
        self._budget_percent = min(self._budget_percent + share, max(100.0, share * _NUM_LATENCIES))

    def record_ended(self, request: InFlightRequest) -> None:
        """The response arrived, or the caller no longer waits for it."""
        self._unhedged.pop(request, None)

    def record_latency(self, seconds: float) -> None:
        """Add the time from sending to the response. A first request that lost counts up to its end: a lower bound."""
        self._latencies.append(seconds)

    def next_due(self, now: float) -> InFlightRequest | None:
        """Return the request to hedge now; None when none is due or the budget is spent."""
        oldest = next(iter(self._unhedged), None)
        if oldest is None or self._budget_percent < 100.0:
            return None
        threshold = self.threshold_seconds()
        return oldest if threshold is not None and now - oldest.sent_at > threshold else None

    def record_hedged(self, request: InFlightRequest) -> None:
        """Charge the budget for a second request."""
        self._unhedged.pop(request, None)
        self._budget_percent -= 100.0

    def threshold_seconds(self) -> float | None:
        """Return the percentile of the newest latencies (nearest rank); None while too few are known."""
        if len(self._latencies) < _MIN_LATENCIES:
            return None
        ordered = sorted(self._latencies)
        return ordered[math.ceil(self._hedging.percentile / 100 * len(ordered)) - 1]
