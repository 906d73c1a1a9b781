"""The head of a run in progress: its status, and the samples that it scored last."""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from rljob_api.run.recent import RecentSamples
from rljob_api.run.trajectories import SampleRow
from rljob_api.wire.contract import UrlPath
from rljob_api.wire.driver_status import DriverStatus
from rljob_cli.run.endpoint import Endpoint

_TIMEOUT = aiohttp.ClientTimeout(total=5)
_BUSY_SECONDS = 60.0
"""A head that starts, or whose machine has too much to do, may answer late: so long it keeps its last status."""
_MAX_SAMPLES = 512
_Answer = TypeVar("_Answer", DriverStatus, RecentSamples)


class Head:
    """What is known of a head. `status` is None while none answers."""

    def __init__(self, find: Callable[[], Endpoint | None]) -> None:
        self._find = find
        self.status: DriverStatus | None = None
        self.feed = ""
        """Id of the samples' numbers."""
        self.samples: deque[SampleRow] = deque(maxlen=_MAX_SAMPLES)
        self.next = 0
        """The number after that of the last sample."""
        self._answered_at = 0.0

    async def refresh(self, session: aiohttp.ClientSession) -> None:
        try:
            await self._ask(session)
        except TimeoutError:
            if time.monotonic() > self._answered_at + _BUSY_SECONDS:
                self.status = None

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        endpoint = self._find()
        self.status = await _get(session, endpoint, UrlPath.STATUS, DriverStatus)
        if self.status is None:
            return
        self._answered_at = time.monotonic()
        found = await _get(session, endpoint, f"{UrlPath.SAMPLES}?after={self.next}", RecentSamples)
        if found is not None and found.feed != self.feed:  # another head: its numbers begin again
            self.samples.clear()
            self.feed = found.feed
            found = await _get(session, endpoint, f"{UrlPath.SAMPLES}?after=0", RecentSamples)
        if found is not None and found.feed == self.feed:
            self.samples.extend(found.samples)
            self.next = found.next


async def _get(
    session: aiohttp.ClientSession, endpoint: Endpoint | None, path: str, kind: type[_Answer]
) -> _Answer | None:
    """Return None if nothing answers, or its version differs too much. Raise TimeoutError if the answer is late."""
    if endpoint is None:
        return None
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    try:
        async with session.get(endpoint.url + path, headers=headers, timeout=_TIMEOUT) as response:
            return kind.model_validate_json(await response.read()) if response.status == 200 else None
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError, ValidationError):
        return None
