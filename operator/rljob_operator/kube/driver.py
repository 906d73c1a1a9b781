"""What a job's driver says of itself: GET /status on the head Pod's address, with the job's token.

Invariant: a driver is asked at most once in POLL_SECONDS, and one that hangs holds a look up for TIMEOUT_SECONDS.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import aiohttp
from pydantic import ValidationError

from rljob_api.contract import LABEL_ROLE, PORT_DRIVER, Path
from rljob_api.protocol import DriverStatus
from rljob_operator.backend import Manifest
from rljob_operator.children.common import HEAD
from rljob_operator.plan import POLL_SECONDS

TIMEOUT_SECONDS = 2.0


class DriverClient:
    """Asks drivers, and remembers what they said for POLL_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, port: int = PORT_DRIVER) -> None:
        self._clock, self._port = clock, port
        self._said: dict[str, tuple[float, DriverStatus | None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, pods: tuple[Manifest, ...], token: str | None) -> DriverStatus | None:
        """None when no driver runs, or when it did not answer."""
        pod = next(filter(_runs_driver, pods), None)
        if pod is None or token is None:
            return None
        uid, now = pod["metadata"]["uid"], self._clock()
        asked_at, said = self._said.get(uid, (float("-inf"), None))
        # A little less, or a poll that comes on time would be told what the one before it was.
        if now - asked_at >= POLL_SECONDS * 0.9:
            self._said = {key: value for key, value in self._said.items() if now - value[0] < POLL_SECONDS * 10}
            self._said[uid] = (now, said)
            said = await self._get(pod["status"]["podIP"], token)
            self._said[uid] = (now, said)
        return said

    async def _get(self, address: str, token: str) -> DriverStatus | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(
                f"http://{host}:{self._port}{Path.STATUS}", headers={"Authorization": f"Bearer {token}"}
            ) as response:
                return DriverStatus.model_validate_json(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValidationError):
            return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _runs_driver(pod: Manifest) -> bool:
    metadata, status = pod["metadata"], pod.get("status", {})
    is_head = (metadata.get("labels") or {}).get(LABEL_ROLE) == HEAD
    return bool(
        is_head and not metadata.get("deletionTimestamp") and status.get("podIP") and status.get("phase") == "Running"
    )
