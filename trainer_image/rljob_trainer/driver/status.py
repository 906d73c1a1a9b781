"""The driver's state as other processes see it: the driver writes, `head.status_server` serves.

Invariant: a manifest is announced only after its file can be downloaded.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator

from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.outages import Outages

log = logging.getLogger(__name__)


Leave = Callable[[], Awaitable[str]]
"""Returns what became of the last steps."""


class StatusBoard:
    def __init__(self, outages: Outages | None = None) -> None:
        """`outages`: of what the job depends on. While one lasts, it is what the driver waits for."""
        self.status = DriverStatus()
        self.outages = outages or Outages()
        self._describe: Callable[[DriverStatus], DriverStatus] = lambda status: status
        self.leave: Leave | None = None
        """Saves before a trainer's Pod ends. None: there is no driver."""
        self.model = ""
        """Where the ranks and rollouts find the trained model, with its version. Empty until the head has looked."""
        self.manifest: WeightManifest | None = None
        self._announced = asyncio.Condition()

    def update(self, **fields: object) -> None:
        """Set fields. A measurement that is not finite, such as the mean of immense scores, counts as unknown."""
        infinite = {
            name: None for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)
        }
        self.status = DriverStatus.model_validate(self.status.model_dump() | fields | infinite)

    def set_phase(self, phase: str, waits_for: str = "") -> None:
        self.update(phase=phase, waits_for=waits_for)

    def waits_for(self, message: str) -> None:
        """Set what the driver waits for, and log it once."""
        if message and message != self.status.waits_for:
            log.info("%s", message)
        self.update(waits_for=message)

    @contextlib.contextmanager
    def live(self, describe: Callable[[DriverStatus], DriverStatus], leave: Leave | None = None) -> Iterator[None]:
        """Within, `describe` completes each snapshot with what changes by the second: the current wait, and demand.
        `leave`: what a trainer's Pod that ends calls."""
        before, self._describe, self.leave = (self._describe, self.leave), describe, leave
        try:
            yield
        finally:
            self._describe, self.leave = before

    def snapshot(self) -> DriverStatus:
        status = self._describe(self.status.model_copy())
        status.outages = self.outages.report()
        status.waits_for = self.outages.describe() or status.waits_for
        return status

    async def announce(self, manifest: WeightManifest) -> None:
        async with self._announced:
            self.manifest = manifest
            self._announced.notify_all()
        self.update(weight_version=manifest.version)

    async def wait_for_manifest(self, key: str, timeout: float) -> WeightManifest | None:
        """Return the newest manifest as soon as its key differs from `key`; None after `timeout` seconds."""
        async with self._announced:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._announced.wait_for(lambda: self._is_new(key))
            return self.manifest if self._is_new(key) else None

    def _is_new(self, key: str) -> bool:
        return self.manifest is not None and self.manifest.key != key
