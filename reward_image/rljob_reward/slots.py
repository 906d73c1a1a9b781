"""What executes requests, as Scorer and Watchdog see it: a pool of slots, each with one request (a sample or a group)
at a time.

Worker processes (pool, process) are one implementation, calls of a model's server (calls) the other. Invariant: a slot
gives exactly one verdict for each request, also when it is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from rljob_api.wire.protocol import InvalidReason
from rljob_reward.workers.process import Started, Verdict


class Slot(Hashable, Protocol):
    """Executes one request at a time."""

    def execute(self, body: bytes, num_samples: int, callback: Callable[[Verdict], None]) -> None:
        """Run one request; `callback` gets its verdict. The slot must be idle."""
        ...

    def kill(self, reason: InvalidReason, message: str) -> None:
        """End the request under way with this verdict. Harmless without one."""
        ...


class SlotPool(Protocol):
    """Slots of one reward. Tells by a callback (on_idle) when one has become idle."""

    @property
    def can_serve(self) -> bool:
        """Whether the server may be ready."""
        ...

    @property
    def has_idle(self) -> bool:
        """Whether acquire() has a slot to give, now."""
        ...

    @property
    def keeps_time(self) -> bool:
        """Whether its slots see to timeoutSeconds themselves. Else a slot is killed after that long."""
        ...

    def owns(self, pid: int) -> bool:
        """Whether that process is the pool's to wait for."""
        ...

    async def start_first(self) -> Started:
        """Make the pool able to serve. UserError when the reward cannot be served."""
        ...

    def acquire(self) -> Slot:
        """An idle slot, which is the caller's until its verdict."""
        ...

    def ensure(self, demand: int) -> None:
        """Grow towards `demand` slots, as far as the pool may."""
        ...

    async def close(self) -> None:
        """End every request under way as cancelled, and what the pool started."""
        ...
