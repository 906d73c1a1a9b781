"""The vLLM sidecar of this server: its socket and its health.

Consumes /health, polled every second; produces `is_up`. Waits for vLLM at startup without a limit: the Pod's startup
probe is the limit.
"""

import asyncio
import logging
import os

import aiohttp

from rljob_api.errors import UserError
from rljob_api.tracing.http_client import trace_configs
from rljob_api.wire.contract import ENV_VLLM_SOCKET

logger = logging.getLogger(__name__)

URL = "http://vllm"
"""The host is ignored on a Unix socket."""
SERVED_MODEL_NAME = "model"
_POLL_SECONDS = 1.0
_HEALTH_TIMEOUT_SECONDS = 5.0


class VllmSidecar:
    def __init__(self) -> None:
        socket = os.environ.get(ENV_VLLM_SOCKET)
        if not socket:
            raise UserError(
                f"${ENV_VLLM_SOCKET} is not set; the operator and `rljob run` start vLLM as a sidecar and set it, "
                "without them run: python -m vllm.entrypoints.openai.api_server --uds SOCKET ..."
            )
        self.session = open_session(socket)
        self.is_up = False
        self._poll: asyncio.Task[None] | None = None

    async def wait_until_ready(self) -> None:
        """Return when vLLM answers; then poll its health."""
        logger.info("waiting for vLLM at %s", os.environ[ENV_VLLM_SOCKET])
        while not await self._is_healthy():  # noqa: ASYNC110 - vLLM sends no event
            await asyncio.sleep(_POLL_SECONDS)
        self.is_up = True
        self._poll = asyncio.get_running_loop().create_task(self._poll_health())

    def close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()

    async def _poll_health(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            up = await self._is_healthy()
            if up != self.is_up:
                logger.log(logging.INFO if up else logging.WARNING, "vLLM is %s", "up" if up else "down")
            self.is_up = up

    async def _is_healthy(self) -> bool:
        return await answers(self.session, f"{URL}/health")


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether a server of vLLM answers 200 in time."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(_HEALTH_TIMEOUT_SECONDS)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):  # a timeout is an OSError
        return False


def open_session(socket: str | None = None) -> aiohttp.ClientSession:
    """Return a session without a connection limit: slots limit the number of connections."""
    connector = aiohttp.UnixConnector(socket, limit=0) if socket else aiohttp.TCPConnector(limit=0)
    # No cookies. Proxies are read from the environment.
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(),
        trust_env=not socket,
        trace_configs=trace_configs(),
    )
