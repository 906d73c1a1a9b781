"""The functions that one tool's server offers: read once it is reachable, and again when its version changes."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.wire.calls import ToolSchema
from rljob_trainer.calls.client import CallClient
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.services.messages import ask_info
from rljob_trainer.services.refusals import REFUSED_STATUSES

log = logging.getLogger(__name__)


@dataclass
class SchemaReader:
    client: CallClient
    session: aiohttp.ClientSession
    _schemas: list[ToolSchema] | None = None
    _version: str = ""
    _reading: asyncio.Task[None] | None = None

    async def read(self) -> list[ToolSchema]:
        """Return the newest schemas that are known; wait for them only if there are none yet.

        Raise UserError if the server has no usable functions, and TransientError if none answers for long.
        """
        if self._schemas is None:
            await asyncio.shield(self._start_reading())  # others wait for the same answer
        assert self._schemas is not None
        return self._schemas

    def record_version(self, version: str) -> None:
        """Read the schemas again, in the background, if a result came from another version."""
        if version and version != self._version:
            self._start_reading()

    @property
    def is_idle(self) -> bool:
        return self._reading is None or self._reading.done()

    async def close(self) -> None:
        await end_tasks(self._reading)

    def _start_reading(self) -> asyncio.Task[None]:
        if self._reading is None or self.is_idle:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_retrieve)
        return self._reading

    async def _read(self) -> None:
        tried: set[str] = set()
        while True:
            async with self.client.replicas.lease(tried) as lease:
                tried.add(lease.address)
                try:
                    info = await self._request(lease.address)
                except UserError:
                    raise
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                    lease.failed(f"cannot query its functions: {type(error).__name__}: {error}")
                    continue
                self._schemas = self._parse(lease.address, info)
                self._version = str(info.get("version") or "")
                lease.done()
                return

    async def _request(self, address: str) -> dict[str, Any]:
        async with ask_info(self.session, address, self.client.headers) as response:
            if response.status in REFUSED_STATUSES:
                text = await response.text()
                raise UserError(f"{self.client.service.path}: {address} returned {response.status}: {text[:500]}")
            response.raise_for_status()
            info = await response.json()
        if not isinstance(info, dict):
            raise ValueError(f"expected a JSON object, got {str(info)[:200]}")
        return info

    def _parse(self, address: str, info: dict[str, Any]) -> list[ToolSchema]:
        path = self.client.service.path
        try:
            schemas = [ToolSchema.model_validate(each, extra="ignore") for each in info.get("tools") or []]
        except (ValidationError, TypeError) as error:
            raise UserError(f"{path}: {address} has unusable functions: {error}") from error
        if not schemas:
            raise UserError(f"{path}: {address} has no functions; define one in the source of the tool")
        return schemas


def _retrieve(task: asyncio.Task[None]) -> None:
    """Log the error of a refresh in the background. The known schemas stay."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s", error)
