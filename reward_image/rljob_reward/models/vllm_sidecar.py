"""The vLLM beside this server: its socket, whether it is up, and waiting for it.

Consumes /health by a look every few seconds; produces `is_up`. Waits for vLLM at the start, as long as it takes: the
Pod's startup probe says when that is too long. Leaves what is asked to the callers.
"""

from __future__ import annotations

import asyncio
import logging
import os

import aiohttp

from rljob_api.errors import UserError
from rljob_api.wire.contract import ENV_VLLM_SOCKET

logger = logging.getLogger(__name__)

URL = "http://vllm"
"""The host means nothing on a Unix socket."""
SERVED_MODEL_NAME = "model"
_LOOK_SECONDS = 1.0
_HEALTH_SECONDS = 5.0


class Beside:
    """vLLM in the same Pod."""

    def __init__(self) -> None:
        socket = os.environ.get(ENV_VLLM_SOCKET)
        if not socket:
            raise UserError(
                f"${ENV_VLLM_SOCKET} is not set: a model runs in a vLLM beside this server. On a cluster, and under "
                "`rljob run`, the Pod has it; by hand: python -m vllm.entrypoints.openai.api_server --uds SOCKET ..."
            )
        self.session = open_session(socket)
        self.is_up = False
        self._watch: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Return once it answers, and keep looking from then on."""
        logger.info("waiting for vLLM at %s", os.environ[ENV_VLLM_SOCKET])
        self.is_up = await self._is_healthy()
        while not self.is_up:
            await asyncio.sleep(_LOOK_SECONDS)
            self.is_up = await self._is_healthy()
        self._watch = asyncio.get_running_loop().create_task(self._keep_looking())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self.session.close()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            up = await self._is_healthy()
            if up != self.is_up:
                logger.log(logging.INFO if up else logging.WARNING, "vLLM is %s", "up" if up else "gone")
            self.is_up = up

    async def _is_healthy(self) -> bool:
        try:
            async with self.session.get(f"{URL}/health", timeout=aiohttp.ClientTimeout(_HEALTH_SECONDS)) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):  # the time-out is an OSError
            return False


def open_session(socket: str | None = None) -> aiohttp.ClientSession:
    """A session that opens as many connections as slots ask for: they are the bound."""
    connector = aiohttp.UnixConnector(socket, limit=0) if socket else aiohttp.TCPConnector(limit=0)
    # No cookies; proxies as the reward's env names them.
    return aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(), trust_env=not socket
    )
