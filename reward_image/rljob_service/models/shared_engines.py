"""The vLLM engines in the trainer's Pods that serve this server's model, in turns with the trainer.

Consumes the DNS records of the trainer's Service and each engine's readiness, polled; produces the engines that are
awake. Invariant: a request goes only to an engine that was awake at the last poll. While none is, requests wait, and
that time counts towards no timeout.
"""

import asyncio
import itertools
import logging
import os

import aiohttp

from rljob_api.wire.contract import ENV_TOKEN, ENV_VLLM_ENGINES, UrlPath
from rljob_api.wire.discovery import listening_port, resolve
from rljob_service.models.vllm_sidecar import answers

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
"""A turn begins with all requests that wait."""


class AwayError(Exception):
    """No engine serves the model now: it is the trainer's turn, or they start. The request has not failed."""


class SharedEngines:
    def __init__(self, addresses: str, token: str) -> None:
        """`addresses`: $RLJOB_VLLM_ENGINES. Create it in an event loop."""
        pairs = [address.rpartition(":") for address in addresses.split()]
        self._targets = [(host, listening_port(int(port))) for host, _, port in pairs]
        headers = {"Authorization": f"Bearer {token}"}
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=headers, cookie_jar=aiohttp.DummyCookieJar()
        )
        self._awake: list[str] = []
        self._turns = itertools.count()
        self._poll: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for engines that are awake."""
        self._poll = asyncio.get_running_loop().create_task(self._poll_forever())

    @property
    def is_awake(self) -> bool:
        return bool(self._awake)

    def pick(self) -> str:
        """Return the URL of an engine, each in its turn. Raise AwayError."""
        if not self._awake:
            raise AwayError("the model's vLLM is asleep, or starts, in the trainer's Pods")
        return self._awake[next(self._turns) % len(self._awake)]

    def drop(self, url: str) -> None:
        """Take an engine that refused a request, or broke off, for away until it is seen awake again."""
        self._awake = [each for each in self._awake if each != url]

    async def close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()
        await self.session.close()

    async def _poll_forever(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_SECONDS)

    async def refresh(self) -> None:
        found = await asyncio.gather(*(self._find(host, port) for host, port in self._targets))
        before, self._awake = self._awake, sorted(set(itertools.chain(*found)))
        if len(before) != len(self._awake):
            logger.info("%d engines of the model are awake", len(self._awake))

    async def _find(self, host: str, port: int) -> list[str]:
        """Return the URLs of the engines at this port that are awake."""
        try:
            addresses = await asyncio.to_thread(resolve, host)
        except (OSError, UnicodeError) as error:  # out of file descriptors, or a hosts file is being written
            logger.warning("cannot look up %s: %s", host, error)
            return []
        urls = [f"http://{address}:{port}" for address in addresses]
        ready = await asyncio.gather(*(answers(self.session, f"{url}{UrlPath.READY}") for url in urls))
        return [url for url, is_awake in zip(urls, ready, strict=True) if is_awake]


def open_engines() -> SharedEngines | None:
    """Return the engines that the environment names, if it does."""
    addresses = os.environ.get(ENV_VLLM_ENGINES)
    return SharedEngines(addresses, os.environ[ENV_TOKEN]) if addresses else None
