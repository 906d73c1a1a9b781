"""Looks who the reward's ready replicas are, for as long as the server lives.

Consumes DNS, every second; produces this replica's share. Leaves what that means to `shares`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

from rljob_api.wire.contract import ENV_HOSTS_FILE, ENV_PEERS, ENV_POD_IP
from rljob_api.wire.discovery import resolve
from rljob_reward.models.judge.shares import ALONE, Share, Shares

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_DNS_PROPAGATION_SECONDS = 35.0
"""The readiness probe's result reaches the EndpointSlice and CoreDNS within a second or two, but CoreDNS and node-local
caches may answer for 30 s from what they have (`cache 30`, `ttl 30` are kubeadm's)."""
_FILE_PROPAGATION_SECONDS = 2.0
"""`rljob run`: the hosts file is written at once and read at each look."""
_DRAIN_SECONDS = 10.0


class Peers:
    """Tells `on_share` this replica's share whenever it looks."""

    def __init__(self, timeout_seconds: float, on_share: Callable[[Share | None], None]) -> None:
        self._service = os.environ.get(ENV_PEERS, "")
        own = os.environ.get(ENV_POD_IP, "")
        self._on_share = on_share
        propagation = _FILE_PROPAGATION_SECONDS if os.environ.get(ENV_HOSTS_FILE) else _DNS_PROPAGATION_SECONDS
        self._shares = Shares(
            own,
            propagation_seconds=propagation,
            leave_seconds=2 * propagation + timeout_seconds + _DRAIN_SECONDS,
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """A server that was started by hand has no peers, and all of the limits."""
        if not self._service:
            self._on_share(ALONE)
            return
        self._on_share(None)
        self._task = asyncio.get_running_loop().create_task(self._keep_looking())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            asked = time.monotonic()  # the answer is at least as young as this
            self._shares.observe(await self._look(), asked)
            self._on_share(self._shares.share(time.monotonic()))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self) -> list[str]:
        """Who is ready. Nobody where that cannot be known: shares take it so."""
        try:
            return await asyncio.to_thread(resolve, self._service)
        except (OSError, UnicodeError) as error:  # no descriptor is left, a hosts file is being written
            logger.warning("cannot look up %s: %s", self._service, error)
            return []
