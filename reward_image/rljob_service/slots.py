"""What executes requests, as Executor sees it: a pool of slots, each for one request (a sample or a group).

Worker processes (pool) are one implementation, calls of a model's server (models) the other. Invariant: a slot
gives exactly one result for each request, also when it is killed.
"""

from collections.abc import Callable
from typing import Protocol

from rljob_api.wire.base import InvalidReason
from rljob_service.results import ExecutionResult, StartupReport

Kill = Callable[[InvalidReason, str], None]
"""Fails a running request with this reason and message. Not to be called after its result."""


class Callback(Protocol):
    def __call__(self, result: ExecutionResult, computed_seconds: float | None = None) -> None:
        """`computed_seconds`: the CPU time of an execution that did nothing but compute; None if it has waited for
        something, or if that is unknown."""


class SlotPool(Protocol):
    """Slots of one service. Calls on_idle when one has become idle."""

    @property
    def can_serve(self) -> bool:
        """Whether the server may be ready."""

    @property
    def has_idle(self) -> bool:
        """Whether a slot is idle, so that start() may be called."""

    @property
    def enforces_timeout(self) -> bool:
        """Whether its slots enforce timeoutSeconds. Otherwise the caller kills a request after that time."""

    @property
    def notice(self) -> str:
        """What delays requests although the server is ready; empty if nothing."""

    def owns(self, pid: int) -> bool:
        """Whether the pool waits for that process."""

    async def start_first(self) -> StartupReport:
        """Make the pool able to serve. Raise UserError if the service cannot start."""

    def start(self, body: bytes, num_samples: int, callback: Callback) -> Kill:
        """Run one request in an idle slot, and later call `callback` with its result. Return what kills it."""

    def ensure(self, demand: int) -> None:
        """Grow towards `demand` slots, as far as the pool may."""

    async def close(self) -> None:
        """Cancel every running request, and end what the pool started."""
