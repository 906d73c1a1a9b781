"""What a job's driver says of itself: GET /status on the head Pod's address, with the job's token.

Invariant: a driver is asked at most once in POLL_SECONDS, unless a caller needs fresher words, and one that hangs holds
a look up for TIMEOUT_SECONDS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import aiohttp
from pydantic import ValidationError

from rljob_api.wire.contract import LABEL_ROLE, PORT_DRIVER, UrlPath
from rljob_api.wire.protocol import DriverStatus
from rljob_operator.backend import Manifest
from rljob_operator.children.common import HEAD
from rljob_operator.plan.job import POLL_SECONDS

TIMEOUT_SECONDS = 2.0
_MAX_ASKED = 4
"""At once: drivers that hang must leave workers to the other jobs. One that is left out is asked at its next poll."""


class Driver(NamedTuple):
    """One driver, and how it is asked."""

    uid: str
    """Of its Pod."""
    address: str
    token: str


class DriverClient:
    """Asks drivers, and remembers what they said for POLL_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, port: int = PORT_DRIVER) -> None:
        self._clock, self._port = clock, port
        self._said: dict[str, tuple[float, DriverStatus | None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._num_asked = 0

    async def ask(self, driver: Driver | None, max_age_seconds: float = POLL_SECONDS) -> DriverStatus | None:
        """None when there is no driver, or when it did not answer."""
        if driver is None:
            return None
        now = self._clock()
        asked_at, said = self._said.get(driver.uid, (float("-inf"), None))
        # A little less, or a poll that comes on time would be told what the one before it was.
        if now - asked_at >= max_age_seconds * 0.9 and self._num_asked < _MAX_ASKED:
            self._said = {key: value for key, value in self._said.items() if now - value[0] < POLL_SECONDS * 10}
            self._said[driver.uid] = (now, said)
            self._num_asked += 1
            try:
                said = await self._get(driver)
            finally:
                self._num_asked -= 1
            self._said[driver.uid] = (now, said)
        return said

    async def _get(self, driver: Driver) -> DriverStatus | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        host = f"[{driver.address}]" if ":" in driver.address else driver.address
        try:
            async with self._session.get(
                f"http://{host}:{self._port}{UrlPath.STATUS}", headers={"Authorization": f"Bearer {driver.token}"}
            ) as response:
                # A newer trainer image may tell more than this operator knows.
                answer = await response.read()
                return DriverStatus.model_validate_json(answer, extra="ignore") if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValidationError):
            return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def find_driver(pods: Iterable[Manifest], token: str | None) -> Driver | None:
    """The driver among a job's Pods; None when none runs."""
    pod = next(filter(_runs_driver, pods), None)
    return Driver(pod["metadata"]["uid"], pod["status"]["podIP"], token) if pod and token else None


def _runs_driver(pod: Manifest) -> bool:
    metadata, status = pod["metadata"], pod.get("status", {})
    is_head = (metadata.get("labels") or {}).get(LABEL_ROLE) == HEAD
    return bool(
        is_head and not metadata.get("deletionTimestamp") and status.get("podIP") and status.get("phase") == "Running"
    )
