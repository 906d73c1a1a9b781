"""Requests of the Pod's program to its engines."""

from __future__ import annotations

import os
from types import TracebackType

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import TransientError
from rljob_api.wire.contract import ENV_TOKEN, PORT_ROLLOUT, UrlPath
from rljob_api.wire.ports import listening_port
from rljob_api.wire.weights import EngineMemory
from rljob_trainer.worker.turns import SERVE, SLEEP

_NOT_WARM = 409


class EngineClient:
    """Must be created, and used, in one event loop."""

    def __init__(self, address: str) -> None:
        """`address`: where this Pod's servers listen; empty for all addresses."""
        self._address = address or "127.0.0.1"
        headers = {"Authorization": f"Bearer {os.environ[ENV_TOKEN]}"}
        self._session = aiohttp.ClientSession(headers=headers)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(self, number: int, wish: str, timeout: float, *, is_warm: bool) -> EngineMemory | None:
        """Ask an engine to sleep (SLEEP), to serve its own model (SERVE), or to wake up for the weights with the key
        `wish`. Return what it holds then;
        None if it does not answer within `timeout` seconds, or is not warm. TransientError if it fails. `is_warm`: it
        was warm before, so it fails if it does not listen."""
        url = f"http://{self._address}:{listening_port(PORT_ROLLOUT) + number}"
        if wish == SLEEP:
            url += UrlPath.ROLLOUT_SLEEP
        else:
            url += UrlPath.ROLLOUT_WAKE if wish == SERVE else f"{UrlPath.ROLLOUT_WAKE}?want={wish}"
        try:
            async with self._session.post(
                url, timeout=aiohttp.ClientTimeout(total=timeout), allow_redirects=False
            ) as response:
                text = await response.text()
        except aiohttp.ClientConnectorError as error:
            if is_warm:
                raise TransientError(f"{url}: {error}") from error
            return None
        except (aiohttp.ClientError, TimeoutError):
            return None
        if response.status == _NOT_WARM:
            return None
        try:
            if response.status != 200:
                raise TransientError(f"{url}: HTTP {response.status}: {text[:500]}")
            return EngineMemory.model_validate_json(text)
        except ValidationError as error:
            raise TransientError(f"{url}: {error}") from error
