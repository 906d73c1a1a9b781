"""When requests may be sent to a model's server."""

from __future__ import annotations

from typing import Protocol


class RateLimiter(Protocol):
    """Admits executions, and charges them for their requests and tokens."""

    def required_wait(self) -> tuple[float, str]:
        """Return the seconds until an execution may start (0: now), and the name of the limit that requires it."""
        ...

    def admit(self) -> float:
        """Start an execution, after a required wait of 0. Return the tokens that it is charged in advance."""
        ...

    def release(self, charged: float, used: float | None) -> None:
        """End an execution. `used`: its tokens; None if unknown."""
        ...

    def pause(self, seconds: float) -> None:
        """Admit nothing for this long."""
        ...

    async def acquire_retry(self) -> None:
        """Wait until a running execution may send one more request."""
        ...


class UnlimitedRateLimiter:
    """No limits, as for the vLLM sidecar."""

    def required_wait(self) -> tuple[float, str]:
        return 0.0, ""

    def admit(self) -> float:
        return 0.0

    def release(self, charged: float, used: float | None) -> None:
        pass

    def pause(self, seconds: float) -> None:
        pass

    async def acquire_retry(self) -> None:
        pass
