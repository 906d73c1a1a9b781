"""Count the ready replicas of this service, which share the rate limits of an endpoint equally.

Consumes the DNS records of its headless Service, every few seconds. If a lookup fails or finds no address, the
last count remains, at first the configured number. DNS caches can delay the count after a change; see docs/judge.md.
"""

import asyncio
import logging
import os
from collections.abc import Callable

from rljob_api.wire.contract import ENV_PEERS, ENV_POD_IP
from rljob_api.wire.discovery import resolve

logger = logging.getLogger(__name__)

_POLL_SECONDS = 2.0


class ReplicaCounter:
    def __init__(self, configured: int, on_count: Callable[[int], None]) -> None:
        self._configured = configured
        self._service = os.environ.get(ENV_PEERS, "")
        self._own_address = os.environ.get(ENV_POD_IP, "")
        self._on_count = on_count
        self._poll: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Count once, then keep counting. Without a Service this is the only replica."""
        self._on_count(self._configured if self._service else 1)
        if self._service:
            await self._refresh()
            self._poll = asyncio.get_running_loop().create_task(self._poll_replicas())

    def close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()

    async def _poll_replicas(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            addresses = await asyncio.to_thread(resolve, self._service)
        except (OSError, UnicodeError) as error:  # out of file descriptors, or a hosts file is being written
            logger.warning("cannot look up %s: %s", self._service, error)
            return
        if addresses:
            self._on_count(len({*addresses, self._own_address}))
