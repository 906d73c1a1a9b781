"""The reward client with real reward servers that die and come back, and a judge's endpoint that is away.

Limits are those of the job's fields: an outage outlasts deadlineSeconds, and one that never ends, outageSeconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.scores import ScoreRequest
from rljob_trainer.outages import OutageError, Outages
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.groups import RewardClient
from tests.support.fake_endpoint import Endpoint, completion
from tests.support.judge_servers import endpoint, judge_reward, new_address, start_judge
from tests.support.reward_process import TOKEN, Server
from tests.support.waiting import DEADLINE_SECONDS, wait_for

__all__ = ["endpoint", "start_judge"]  # fixtures

FUNCTION = "def reward(prompt, response, ground_truth):\n    return float(response)\n"


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(tmp_path / "hosts"))
    monkeypatch.setenv("RLJOB_TOKEN", TOKEN)
    monkeypatch.setenv("RLJOB_REWARD_SERVICES", json.dumps({"test": "rewards"}))


def list_server(tmp_path: Path, host: str) -> None:
    (tmp_path / "hosts").write_text(f"{host} rewards\n")


@contextlib.asynccontextmanager
async def connected(reward: dict[str, Any], outages: Outages) -> AsyncIterator[RewardClient]:
    async with open_session() as session, asyncio.timeout(DEADLINE_SECONDS):
        client = RewardClient(Reward.model_validate(reward), session, outages=outages)
        await client.start()
        try:
            yield client
        finally:
            await client.close()


def sample(name: str, text: str = "1") -> ScoreRequest:
    return ScoreRequest(id=name, prompt="2+2?", completion=text)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    """start(): the server of FUNCTION, always at the same address."""
    (tmp_path / "service.yaml").write_text(yaml.safe_dump({"name": "test", "function": {"inline": FUNCTION}}))
    servers, host = list[Server](), new_address()
    list_server(tmp_path, host)

    def start_one() -> Server:
        servers.append(Server(tmp_path, host, ["--grace", "2"], {}))
        wait_for(servers[-1].is_ready, "the server to be ready")
        return servers[-1]

    yield start_one
    for server in servers:
        server.stop()


async def test_killed_server_costs_no_sample_and_then_the_job(start: Callable[[], Server]) -> None:
    reward = {"name": "test", "function": {"inline": FUNCTION}, "deadlineSeconds": 1, "failurePolicy": {"retries": 0}}
    server = await asyncio.to_thread(start)
    async with connected(reward, Outages()) as client:
        [first] = await client.score(sample("first"))
        assert first.valid
        server.process.kill()
        scoring = [asyncio.create_task(client.score(sample(f"s{i}"))) for i in range(4)]
        await until(lambda: client.health.failing_seconds > 1.5)
        server = await asyncio.to_thread(start)
        found = await asyncio.gather(*scoring)
        assert [each.score for [each] in found] == [1.0] * 4
    server.process.kill()
    async with connected(reward, Outages(1)) as client:
        with pytest.raises(OutageError, match=r"^spec.rewards\[0\].function \(rewards\): away since .* Cannot connect"):
            await client.score(sample("last"))


async def test_judges_endpoint_that_is_away_costs_no_sample(
    tmp_path: Path, start_judge: Callable[..., Server], endpoint: Endpoint
) -> None:
    host, outages = new_address(), Outages()
    fields = {"timeoutSeconds": 1, "deadlineSeconds": 2, "failurePolicy": {"retries": 0}}
    endpoint.reset(lambda body, number: completion("Score: 1"))
    await asyncio.to_thread(start_judge, host=host, **fields)
    list_server(tmp_path, host)
    async with connected(judge_reward(endpoint.url, {}, **fields), outages) as client:
        [first] = await client.score(sample("first"))
        assert first.valid
        endpoint.reset(lambda body, number: web.Response(status=503, text="no upstream"))
        scoring = [asyncio.create_task(client.score(sample(f"s{i}", f"{i}"))) for i in range(4)]
        await until(lambda: client.health.failing_seconds > 2.5)
        assert "503 no upstream" in client.health.last_error
        endpoint.reset(lambda body, number: completion("Score: 1"))
        found = await asyncio.gather(*scoring)
    assert [each.score for [each] in found] == [1.0] * 4
