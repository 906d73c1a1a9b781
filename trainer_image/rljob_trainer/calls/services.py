"""All services of an agent, as one: the simulated user, the tools, the runner. Implements agents.base.Services and
agents.base.EpisodeRunner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.agent import RUNNER_SERVICE
from rljob_api.manifest.job import Service
from rljob_api.wire.protocol import CallRequest, CallResult, Lane
from rljob_trainer.agents.base import EpisodeMessage, ToolSet
from rljob_trainer.calls.client import CallClient, ServiceClient
from rljob_trainer.calls.runner import RunnerClient
from rljob_trainer.calls.schemas import SchemaReader


class AgentServices:
    def __init__(self, services: Sequence[Service], session: aiohttp.ClientSession) -> None:
        """`services`: of the job; rewards among them are ignored."""
        self._runners = {each.reward.name: RunnerClient(each, session) for each in services if each.kind == "runner"}
        self._callable = {
            each.reward.name: CallClient(each, session) for each in services if each.kind in ("user", "tool")
        }
        self.clients: dict[str, ServiceClient] = {**self._callable, **self._runners}
        self.on_call: Callable[[str, Lane, CallResult, float], None] = lambda service, lane, result, seconds: None
        """Called with each result, and the seconds until it."""
        self.readers = {
            name: SchemaReader(client, session)
            for name, client in self._callable.items()
            if client.service.kind == "tool"
        }

    async def start(self) -> None:
        for client in self.clients.values():
            await client.start()

    async def close(self) -> None:
        for reader in self.readers.values():
            await reader.close()
        for client in self.clients.values():
            await client.close()

    async def tools(self) -> ToolSet:
        """Return the functions of all tools. Raise UserError if two of them have the same name."""
        found = await asyncio.gather(*(reader.read() for reader in self.readers.values()))
        owners: dict[str, str] = {}
        for name, schemas in zip(self.readers, found, strict=True):
            for schema in schemas:
                if (other := owners.setdefault(schema.name, name)) != name:
                    paths = [self.clients[each].service.path for each in (other, name)]
                    raise UserError(
                        f"{paths[0]} ({other}) and {paths[1]} ({name}) both have a function {schema.name}; rename one"
                    )
        return ToolSet([schema for schemas in found for schema in schemas], owners)

    async def call(self, service: str, request: CallRequest) -> tuple[CallResult, float]:
        """Return the result of a call, and the seconds until it."""
        result, seconds = await self._callable[service].call(request)
        if reader := self.readers.get(service):
            reader.record_version(result.version)
        self.on_call(service, request.lane, result, seconds)
        return result, seconds

    async def run(self, message: EpisodeMessage) -> tuple[CallResult, float]:
        """Return the result of an episode, and the seconds until it."""
        result, seconds = await self._runners[RUNNER_SERVICE].run(message)
        self.on_call(RUNNER_SERVICE, message.lane, result, seconds)
        return result, seconds

    @property
    def has_runner(self) -> bool:
        """Whether a runner plays the episodes."""
        return bool(self._runners)

    def describe_wait(self) -> str:
        """Describe the calls in flight; empty without any."""
        return "; ".join(wait for client in self.clients.values() if (wait := client.describe_wait()))
