"""All services of an agent, as one: the simulated user, the tools, the runner. Implements agents.base.Services and
agents.base.EpisodeRunner. The functions of a tool are read once it is reachable, and again when its version changes.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.job_spec import Service, ServiceKind
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.wire.base import Lane
from rljob_api.wire.calls import CallRequest, CallResult, ToolSchema
from rljob_api.wire.contract import END_EPISODE
from rljob_trainer import traces
from rljob_trainer.agents.base import EpisodeMessage, ToolSet
from rljob_trainer.calls.client import CallClient, FunctionCall, RunnerClient
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.outages.registry import Dependency, Outages
from rljob_trainer.services.client import ServiceClient
from rljob_trainer.services.load import ServiceLoad
from rljob_trainer.services.messages import REFUSED_STATUSES, ask_info

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


class AgentServices:
    def __init__(
        self,
        services: Sequence[Service],
        session: aiohttp.ClientSession,
        *,
        outages: Outages | None = None,
        runner_calls: Sequence[Dependency] = (),
        on_call: Callable[[str, Lane, CallResult, float], None] = lambda service, lane, result, seconds: None,
        working: Callable[[ServiceKind], AbstractContextManager[None]] = lambda kind: nullcontext(),
    ) -> None:
        """`services`: of the job; rewards among them are ignored. `runner_calls`: see RunnerClient. `on_call`: called
        with each result, and the seconds until it. `working`: returns the context of a call."""
        self._runners = {
            each.settings.name: RunnerClient(each, session, outages, runner_calls)
            for each in services
            if each.kind == "runner"
        }
        self._callable = {
            each.settings.name: CallClient(each, session, outages) for each in services if each.kind in ("user", "tool")
        }
        self.clients: dict[str, ServiceClient[CallResult]] = {**self._callable, **self._runners}
        self._ending: set[asyncio.Task[None]] = set()
        self._on_call, self._working = on_call, working
        self.readers = {
            name: SchemaReader(client, session)
            for name, client in self._callable.items()
            if client.service.kind == "tool"
        }

    async def start(self) -> None:
        for client in self.clients.values():
            await client.start()

    async def close(self) -> None:
        await end_tasks(*self._ending)
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
                    paths = [self._callable[each].service.path for each in (other, name)]
                    raise UserError(
                        f"{paths[0]} ({other}) and {paths[1]} ({name}) both have a function {schema.name}; rename one"
                    )
        return ToolSet([schema for schemas in found for schema in schemas], owners)

    async def call(self, service: str, request: CallRequest) -> tuple[CallResult, float]:
        """Return the result of a call, and the seconds until it."""
        client = self._callable[service]
        with self._working(client.service.kind), traces.begin_tool(service, request.function, request.id) as span:
            [result], pending = await client.call(FunctionCall(request))
            traces.record_call(span, result)
        if reader := self.readers.get(service):
            reader.record_version(result.version)
        self._on_call(service, request.lane, result, pending.seconds)
        return result, pending.seconds

    def end_episode(self, tool: str, episode: str, lane: Lane) -> None:
        """Let a tool free what it holds for an episode, in the background. What a tool fails to free expires."""
        task = asyncio.create_task(self._end_episode(tool, episode, lane))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_episode(self, tool: str, episode: str, lane: Lane) -> None:
        request = CallRequest(id=f"{episode}/end", lane=lane, function=END_EPISODE, episode=episode, arguments={})
        try:
            [result], _ = await self._callable[tool].call(FunctionCall(request))
            problem = result.message
        except RLJobError as error:
            problem = str(error)
        if problem:
            log.warning("tool %s still holds what it had for the episode %s: %s", tool, episode, problem)

    async def run(self, message: EpisodeMessage) -> tuple[CallResult, float]:
        """Return the result of an episode, and the seconds until it."""
        with self._working("runner"), traces.begin_program() as span:
            result, seconds = await self._runners[RUNNER_SERVICE].run(message)
            traces.record_call(span, result)
        self._on_call(RUNNER_SERVICE, message.lane, result, seconds)
        return result, seconds

    @property
    def has_runner(self) -> bool:
        """Whether a runner plays the episodes."""
        return bool(self._runners)

    def loads(self) -> dict[str, ServiceLoad]:
        """Return what the autoscaler needs, by service."""
        return {name: client.load() for name, client in self.clients.items()}

    def describe_wait(self) -> str:
        """Describe the calls in flight; empty without any."""
        return "; ".join(wait for client in self.clients.values() if (wait := client.describe_wait()))
