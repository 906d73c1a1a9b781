"""Asks each of a reward's replicas for its version, once, and keeps requests to those of the pinned one.

Consumes: the addresses that discovery found, and GET /v1/info of each. Produces: the version that `Fleet.required_key` names.
Waits for: nothing; it is called with each tick. A replica that failed is asked again, since it may have come back as
another version. The decisions are `versions`'.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import aiohttp

from rljob_api.wire.contract import PORT_REWARD, UrlPath
from rljob_trainer.replicas.http import CONNECT_SECONDS
from rljob_trainer.replicas.pool import ReplicaPool
from rljob_trainer.rewards.version_pin import PENDING, UNTOLD, Pin

log = logging.getLogger(__name__)

_INFO_SECONDS = 10.0
_TELLS_NOTHING = (401, 403, 404, 405)
"""It has no such page, or not for us; a request for a score says so in the words that a user can act on."""


class VersionWatch:
    """What the replicas of one reward serve, and the pin over them."""

    def __init__(self, replicas: ReplicaPool, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.pin = Pin()
        self._replicas = replicas
        self._session = session
        self._headers = headers
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._has_begun = False

    def begin(self) -> None:
        """A collection begins: pin what most replicas serve now, or what the first one will."""
        self._has_begun = True
        self.pin.begin(self._replicas.fleet.versions())
        self._require()

    def tick(self) -> None:
        """Ask those that have not told their version; see whether the pinned one is gone."""
        fleet = self._replicas.fleet
        self._asking = {address: task for address, task in self._asking.items() if not task.done()}
        for address in fleet.list_unidentified(self._replicas.now()):
            if address not in self._asking:
                self._asking[address] = asyncio.create_task(self._identify(address))
        self._observe()

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def record_result(self, address: str, version: str) -> bool:
        """Whether a result of `version` counts. One that does not tells what is behind that address now."""
        if self.pin.accepts(version):
            return True
        self._replicas.fleet.record_version(address, version)
        return False

    def _observe(self) -> None:
        before = self.pin.version
        if not self._has_begun or not self.pin.observe(self._replicas.fleet.versions(), self._replicas.now()):
            return
        if before is not None:
            log.warning(
                "%s: no replica has version %s any more: samples that no update has used are scored again with %s",
                self._replicas.name, before, self.pin.version,
            )  # fmt: skip
        self._require()

    def _require(self) -> None:
        self._replicas.fleet.require(self.pin.version or PENDING)
        self._replicas.dispatch()

    async def _identify(self, address: str) -> None:
        fleet, url = self._replicas.fleet, f"http://{address}:{PORT_REWARD}{UrlPath.INFO.value}"
        timeout = aiohttp.ClientTimeout(total=_INFO_SECONDS, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.get(url, headers=self._headers, timeout=timeout) as response:
                if response.status in _TELLS_NOTHING:
                    version = ""
                else:
                    response.raise_for_status()
                    version = str((await response.json()).get("version") or "")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError) as error:
            log.info(
                "%s %s does not tell its version: %s: %s", self._replicas.name, address, type(error).__name__, error
            )
            fleet.record_suspect(address, self._replicas.now())
            return
        fleet.record_version(address, version or UNTOLD)
        self._observe()
        self._replicas.dispatch()
