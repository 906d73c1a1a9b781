"""Reads the status of a job's driver: GET /status at the head Pod's address, with the job's token.

Invariant: a driver gets at most one request per PROGRESS_POLL_SECONDS unless a caller needs a fresher answer. One that
hangs delays a reconcile by TIMEOUT_SECONDS.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import aiohttp
from cachetools import TTLCache
from pydantic import ValidationError

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import PORT_DRIVER, UrlPath
from rljob_api.wire.protocol import DriverStatus
from rljob_operator.backend import PROGRESS_POLL_SECONDS, ChildKey, ObservedState
from rljob_operator.children.common import child_name
from rljob_operator.children.config import read_token
from rljob_operator.plan.observed_job import find_pods, is_running_head

TIMEOUT_SECONDS = 2.0
_MAX_CONCURRENT_REQUESTS = 4
"""Drivers that hang must leave workers for the other jobs. A driver above the limit is asked at its next poll."""
_CACHE_SECONDS = PROGRESS_POLL_SECONDS * 10
_MAX_CACHED = 100_000


class DriverEndpoint(NamedTuple):
    pod_uid: str
    address: str
    token: str


class _Answer(NamedTuple):
    requested_at: float
    status: DriverStatus | None


class DriverClient:
    """Requests and caches the status of drivers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, port: int = PORT_DRIVER) -> None:
        self._clock, self._port = clock, port
        self._answers: TTLCache[str, _Answer] = TTLCache(_MAX_CACHED, _CACHE_SECONDS, clock)
        self._session: aiohttp.ClientSession | None = None
        self._num_requests = 0

    async def get_status(
        self, driver: DriverEndpoint | None, max_age_seconds: float = PROGRESS_POLL_SECONDS
    ) -> DriverStatus | None:
        """Return None if there is no driver, or it did not answer."""
        if driver is None:
            return None
        now = self._clock()
        last = self._answers.get(driver.pod_uid, _Answer(float("-inf"), None))
        # Slightly less than the maximum: otherwise a punctual poll would get the answer of the previous one.
        if now - last.requested_at < max_age_seconds * 0.9 or self._num_requests >= _MAX_CONCURRENT_REQUESTS:
            return last.status
        self._answers[driver.pod_uid] = _Answer(now, last.status)
        self._num_requests += 1
        try:
            status = await self._request(driver)
        finally:
            self._num_requests -= 1
        self._answers[driver.pod_uid] = _Answer(now, status)
        return status

    async def _request(self, driver: DriverEndpoint) -> DriverStatus | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        host = f"[{driver.address}]" if ":" in driver.address else driver.address
        try:
            async with self._session.get(
                f"http://{host}:{self._port}{UrlPath.STATUS}", headers={"Authorization": f"Bearer {driver.token}"}
            ) as response:
                # The trainer image of a job may be newer than this operator.
                body = await response.read()
                return DriverStatus.model_validate_json(body, extra="ignore") if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValidationError):
            return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def find_driver(job: RLJob, observed: ObservedState) -> DriverEndpoint | None:
    """Return the running driver. The head of an earlier job of this name may still run; it is ignored."""
    secret = observed.children.get(ChildKey("Secret", child_name(job, "token")))
    token = read_token(secret) if secret else None
    heads = filter(is_running_head, find_pods(job, observed))
    pod = next((head for head in heads if head["status"].get("podIP")), None)
    return DriverEndpoint(pod["metadata"]["uid"], pod["status"]["podIP"], token) if pod and token else None
