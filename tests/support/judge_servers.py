"""Judges and model users at a fake endpoint: in this process (`make_judge`, `make_user`), and as real servers
(`start_judge`, `start_user`)."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.wire.calls import CallRequest, CallResult
from rljob_api.wire.scores import GroupRequest, GroupResult, ScoreRequest, ScoreResult
from rljob_service.server.executor import Executor
from rljob_service.server.metrics import ServerMetrics
from rljob_service.server.served_service import load_service
from rljob_service.worker.settings import SCORE, USER
from tests.support.fake_endpoint import Endpoint
from tests.support.reward_process import Server
from tests.support.seconds import restore, round_up
from tests.support.waiting import wait_for

_numbers = itertools.count(1)
_BLOCK = f"127.77.{1 + os.getpid() % 250}"


def new_address() -> str:
    return f"{_BLOCK}.{next(_numbers) % 250 + 1}"


def judge_reward(url: str, judge: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a Reward with the smallest judge at `url`, changed by `judge` and `fields`."""
    judge = dict(judge)
    endpoint = {"url": url, "model": "gpt-judge", **judge.pop("endpoint", {})}
    smallest = {"template": "Rate: {{ completion }}", "parser": {"regex": r"Score: (\S+)"}, "endpoint": endpoint}
    return {"name": "test", "judge": {**smallest, **judge}, "timeoutSeconds": 20, **fields}


def user_service(url: str, model: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the settings of the smallest model user at `url`, changed by `model` and `fields`."""
    model = dict(model)
    changes = model.pop("endpoint", {})
    endpoint = None if changes is None else {"url": url, "model": "gpt-user", **changes}
    smallest = {"persona": "You want {{ ground_truth }}.", "stop": "[DONE]", "endpoint": endpoint}
    return {"name": "user", "userModel": {**smallest, **model}, "timeoutSeconds": 20, **fields}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    running = Endpoint(new_address())
    yield running
    running.close()


class InProcessReward:
    """An Executor with a judge, a classifier or a model user, without HTTP."""

    def __init__(self, reward: Any) -> None:
        self.metrics = ServerMetrics(reward.config.name, reward.config.slots)
        self.executor = Executor(reward, self.metrics)

    async def score(self, completion: str, **fields: Any) -> ScoreResult:
        request = ScoreRequest(id=f"r{next(_numbers)}", prompt="2+2?", completion=completion, **fields)
        return ScoreResult.model_validate_json(await self._submit(request))

    async def score_group(self, request: dict[str, Any]) -> GroupResult:
        result = GroupResult.model_validate_json(await self._submit(GroupRequest.model_validate(request)))
        assert [each.id for each in result.results] == [sample["id"] for sample in request["samples"]]
        return result

    async def call(self, *messages: dict[str, Any], **fields: Any) -> CallResult:
        """Return the reply of a model user to a conversation on the prompt `2+2?`."""
        arguments = {"messages": list(messages), "prompt": "2+2?", **fields}
        request = CallRequest(id=f"r{next(_numbers)}", arguments=arguments)
        return CallResult.model_validate_json(await self._submit(request))

    async def _submit(self, request: ScoreRequest | GroupRequest | CallRequest) -> bytes:
        waiter = _Waiter()
        self.executor.submit(request, request.model_dump_json().encode(), waiter)
        return await waiter.result

    def metric(self, line: str) -> float:
        rows = self.metrics.render().decode().splitlines()
        return next((float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith(line)), 0.0)


class _Waiter:
    def __init__(self) -> None:
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def deliver(self, result: bytes) -> None:
        self.result.set_result(result)

    def is_disconnected(self) -> bool:
        return False

    def call_when_left(self, callback: Callable[[], None]) -> None: ...


@asynccontextmanager
async def run_reward(folder: Path, reward: dict[str, Any], serves: str = SCORE) -> AsyncIterator[InProcessReward]:
    """Start an InProcessReward. Raises UserError if it cannot be served."""
    path = folder / f"reward-{next(_numbers)}.yaml"
    path.write_text(yaml.safe_dump(round_up(reward)))
    served = load_service(path, serves=serves)
    restore(served.config, reward)
    running = InProcessReward(served)
    try:
        await running.executor.pool.start_first()
        yield running
    finally:
        await running.executor.close()


@pytest.fixture
async def make_reward(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await make_reward(reward, serves)`: a started InProcessReward, closed with the test."""
    async with AsyncExitStack() as stack:
        yield lambda reward, serves=SCORE: stack.enter_async_context(run_reward(tmp_path, reward, serves))


@pytest.fixture
def make_judge(make_reward: Callable[..., Any], endpoint: Endpoint) -> Callable[..., Any]:
    """`await make_judge(judge={}, **fields of the Reward)`: the smallest judge with changes, in this process."""
    return lambda judge=None, **fields: make_reward(judge_reward(endpoint.url, judge or {}, **fields))


@pytest.fixture
def make_user(make_reward: Callable[..., Any], endpoint: Endpoint) -> Callable[..., Any]:
    """`await make_user(model={}, **fields of the service)`: the smallest model user with changes, in this process."""
    return lambda model=None, **fields: make_reward(user_service(endpoint.url, model or {}, **fields), USER)


@pytest.fixture(scope="module")
def start_judge(tmp_path_factory: pytest.TempPathFactory, endpoint: Endpoint) -> Iterator[Callable[..., Server]]:
    """start_judge(judge={}, environment={}, wait=True, **fields of the Reward): the same as a real reward server."""
    yield from _start_servers(tmp_path_factory, endpoint, judge_reward, SCORE)


@pytest.fixture(scope="module")
def start_user(tmp_path_factory: pytest.TempPathFactory, endpoint: Endpoint) -> Iterator[Callable[..., Server]]:
    """start_user(model={}, ...): the smallest model user, as start_judge."""
    yield from _start_servers(tmp_path_factory, endpoint, user_service, USER)


def _start_servers(
    tmp_path_factory: pytest.TempPathFactory, endpoint: Endpoint, build: Callable[..., dict[str, Any]], serves: str
) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(
        changes: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        host: str | None = None,
        **fields: Any,
    ) -> Server:
        folder = tmp_path_factory.mktemp(serves)
        (folder / "service.yaml").write_text(yaml.safe_dump(build(endpoint.url, changes or {}, **fields)))
        arguments = ["--grace", "2", "--serves", serves]
        server = Server(folder, host or new_address(), arguments, environment or {})
        servers.append(server)
        if wait:
            wait_for(server.is_ready, "the server to be ready")
        return server

    yield start
    for server in servers:
        server.stop()
