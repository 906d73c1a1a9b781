"""The clients of what an agent calls: the simulated user or the functions of a tool, and the runner of episodes, which
also gives the rows of a job's environment or program before the driver starts.

Each time that an episode is sent is another attempt with another key. Closing its request ends the episode's process.
Invariant: a response becomes one result, or an invalid result with a reason if it breaks the protocol.

`AgentServices` is the whole of an agent's services, and implements agents.base.Services and agents.base.EpisodeRunner.
The functions of a tool are read once it is reachable, and again when its version changes.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.manifest.job_spec import Service, ServiceKind
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.calls import CallRequest, CallResult, RowsCall, RowsReply, ToolSchema
from rljob_api.wire.contract import (
    END_EPISODE,
    MAX_EPISODE_REPLY_BYTES,
    MAX_ROWS_OF_PAGE,
    MAX_TOOL_RESULT_CHARACTERS,
    MAX_USER_REPLY_BYTES,
    READ_ROWS,
    UrlPath,
)
from rljob_api.wire.driver_status import RewardDemand
from rljob_api.wire.scores import Part
from rljob_trainer import traces
from rljob_trainer.agents.base import EpisodeMessage, ToolSet
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.outages import PAUSES, Dependency, Outages, double
from rljob_trainer.replicas.pool import ReplicaLease
from rljob_trainer.services.client import ServiceClient
from rljob_trainer.services.demand import ServiceLoad
from rljob_trainer.services.messages import REFUSED_STATUSES, PendingRequest, ask_info

log = logging.getLogger(__name__)

_EPISODES_PER_SLOT: Final = 1
"""An episode lasts much longer than the way of a request: one that waits does so in the driver, for whichever replica
is free first."""


_MAX_BYTES_PER_CHARACTER = 12
"""A character outside the basic plane is two escapes, \\uXXXX\\uXXXX, in JSON that is ASCII."""
_MAX_VALUE_BYTES = max(
    MAX_USER_REPLY_BYTES, MAX_EPISODE_REPLY_BYTES, _MAX_BYTES_PER_CHARACTER * MAX_TOOL_RESULT_CHARACTERS
)
_MAX_RESPONSE_BYTES = _MAX_VALUE_BYTES + (64 << 10)
"""A value with the other fields of its result."""


@dataclass(frozen=True)
class FunctionCall:
    """A call of the simulated user or a tool: a request to /v1/call, as services.messages.Call describes it. Retries
    send the same one, with the same id."""

    request: CallRequest | EpisodeMessage
    num_results = 1
    path = UrlPath.CALL.value
    max_response_bytes = _MAX_RESPONSE_BYTES
    is_short = False

    @property
    def lane(self) -> Lane:
        return self.request.lane

    def encode(self, reads: Collection[Part] = ()) -> bytes:
        """Return the body. Raise ValueError for arguments without a JSON form, such as NaN or too deep a nesting."""
        assert isinstance(self.request, CallRequest)
        return _encode(self.request)

    def read(self, text: str, seconds: float) -> list[CallResult]:
        try:
            result = CallResult.model_validate_json(text, extra="ignore")
            if result.id != self.request.id:
                raise ValueError(f"it is for {result.id}")
            if result.valid != (result.reason is None):
                raise ValueError("a result must be valid without a reason, or invalid with one")
        except (ValueError, RecursionError) as error:
            return self.fail(InvalidReason.BAD_RETURN, f"invalid response {text[:200]}: {error}", seconds)
        return [result]

    def fail(self, reason: InvalidReason, message: str, seconds: float = 0.0) -> list[CallResult]:
        failed = CallResult(
            id=self.request.id, valid=False, reason=reason, message=message[:2000], execute_seconds=seconds
        )
        return [failed]


@dataclass(frozen=True)
class EpisodeRequest(FunctionCall):
    """An episode. Retries have the same id and another attempt."""

    request: EpisodeMessage

    def encode(self, reads: Collection[Part] = ()) -> bytes:
        """Begin an attempt, and return its body. Raise ValueError for a row without a JSON form."""
        return _encode(self.request.next_attempt())


def _encode(request: CallRequest) -> bytes:
    try:
        text = json.dumps(request.model_dump(), ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return text.encode("utf-8", "replace")


class CallClient(ServiceClient[CallResult]):
    """Client of the simulated user or a tool."""

    def __init__(self, service: Service, session: aiohttp.ClientSession, outages: Outages | None = None) -> None:
        name = "simulated user" if service.kind == "user" else f"tool {service.settings.name}"
        super().__init__(service.settings, service.path, session, name=name, source=service.source, outages=outages)
        self.service = service

    def _count_readers(self) -> int:
        """Return how many wait for the functions of the tool."""
        return max(0, self.replicas.num_waiting - self.num_waiting())

    def describe_wait(self) -> str:
        """Return `3 replies of the user, oldest 4.1 s`, and what is missing; empty if nothing is in flight."""
        count = len(self.in_flight)
        if not count and not self.replicas.num_waiting:
            return ""
        if not count:  # its functions must be known before the first prompt
            return f"the functions of the {self.replicas.name}{self._describe_missing()}"
        if self.service.kind == "user":
            return f"{count} {'replies' if count > 1 else 'reply'} of the user{self._describe_oldest()}"
        what = f"{count} {'results' if count > 1 else 'result'}"
        return f"{what} of the tool {self.service.settings.name}{self._describe_oldest()}"


class RunnerClient(ServiceClient[CallResult]):
    HOLDS_SLOTS: ClassVar[bool] = True

    def __init__(
        self,
        service: Service,
        session: aiohttp.ClientSession,
        outages: Outages | None = None,
        calls: Sequence[Dependency] = (),
    ) -> None:
        """`calls`: what episodes call, such as the rollouts. An episode that fails while one of them is away does not
        count."""
        self._calls = calls
        super().__init__(
            service.settings,
            service.path,
            session,
            name="runner",
            source=service.source,
            outages=outages,
            in_flight_per_slot=_EPISODES_PER_SLOT,
        )

    async def _send(self, lease: ReplicaLease, pending: PendingRequest[CallResult]) -> list[CallResult] | None:
        """Send an attempt, and end it, with a response or without."""
        assert isinstance(pending.call, EpisodeRequest)
        try:
            return await super()._send(lease, pending)
        finally:
            pending.call.request.end_attempt()

    async def run(self, message: EpisodeMessage) -> tuple[CallResult, float]:
        """Return the result and the seconds until it. Raise UserError and TransientError."""
        started_at, delays = time.monotonic(), double(*PAUSES)
        while True:
            sent_at = self.replicas.now()
            [result], _ = await self.call(EpisodeRequest(message))
            if result.valid or not any(each.was_away(sent_at) for each in self._calls):
                return result, time.monotonic() - started_at
            for each in self._calls:
                each.check()
            log.warning("episode %s is run again, since what it calls was away: %s", message.id, result.message)
            await asyncio.sleep(next(delays))

    def describe_wait(self) -> str:
        """Return `3 episodes in the runner, oldest 41 s, 2 wait for a free slot`; empty if nothing is in flight."""
        count, num_waiting = len(self.in_flight), self.num_waiting()
        if not count:
            return ""
        what = f"{count} {'episodes' if count > 1 else 'episode'} in the runner"
        waiting = f", {num_waiting} of them for a free slot" if num_waiting else ""
        return f"{what}{self._describe_oldest(waiting)}"


_NO_ANSWER: Final = (InvalidReason.UNREACHABLE, InvalidReason.DEADLINE)
"""Reasons for which the environment is not the cause."""


class RowsClient(ServiceClient[CallResult]):
    """Client of the runner for rows alone."""

    SPREADS: ClassVar = False
    """A replica that did not make the earlier rows of a generator has to make them before those of a page."""

    def __init__(self, service: Service, session: aiohttp.ClientSession, outages: Outages | None = None) -> None:
        super().__init__(service.settings, service.path, session, name="runner", source=service.source, outages=outages)
        self.environment = describe_environment(service)

    async def close(self) -> None:
        await super().close()
        self.health.clear()  # nothing asks it again

    async def read(self, split: str, start: int, count: int = MAX_ROWS_OF_PAGE) -> RowsReply:
        """Return a page of rows. Raise UserError if the environment has none to give, and TransientError if it does not
        answer. The caller adds the field of the job."""
        call = RowsCall(split=split, start=start, count=min(count, MAX_ROWS_OF_PAGE))
        request = CallRequest(id=f"rows/{split}/{start}", function=READ_ROWS, arguments=call.model_dump())
        [result], _ = await self.call(FunctionCall(request))
        if result.valid:
            return self._parse(result)
        problem = f"{self.environment} gave no rows: {result.message}"
        if result.reason is InvalidReason.BAD_REQUEST:  # its message says what to do
            raise UserError(problem)
        if result.reason in _NO_ANSWER:
            raise TransientError(problem)
        raise UserError(f"{problem} ({result.reason}); correct what returns them, or the split")

    def _parse(self, result: CallResult) -> RowsReply:
        try:
            return RowsReply.model_validate(result.value, extra="ignore")
        except ValidationError as error:
            raise UserError(f"{self.environment} gave no rows, but {str(result.value)[:200]}: {error}") from error

    def demand(self) -> RewardDemand:
        """Return what an autoscaler needs to know while rows are read: one slot."""
        return RewardDemand(samples=1, expected=1, holds_slots=True, is_open=True, is_first=True)

    def describe_wait(self) -> str:
        """Return what is missing; empty if a page is on its way."""
        return "" if self.replicas.fleet.replicas else self._describe_missing()


def describe_environment(service: Service) -> str:
    """Return `the environment my-env of verifiers`, or `the program of agent.runner.function`."""
    function = service.settings.function
    given = (function.factory_args or {}).get("id") if function else None
    if service.framework:
        return f"the environment {given} of {service.framework}" if given else f"the environment of {service.framework}"
    return "the program of agent.runner.function"


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
