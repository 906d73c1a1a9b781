"""A classifier whose engines run in the trainer's Pods: it waits for them, and never makes up a result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from rljob_api.wire.contract import ENV_HOSTS_FILE, ENV_TOKEN, ENV_VLLM_ENGINES, UrlPath
from rljob_service.models import shared_engines
from tests.support.waiting import DEADLINE_SECONDS

REWARD: dict[str, Any] = {"name": "test", "model": {"source": "/m"}, "timeoutSeconds": 60}


class Engine:
    """Stands for the program of an engine: readiness, and /classify."""

    def __init__(self) -> None:
        self.is_awake, self.outputs = True, [0.5]
        self.num_polls, self.num_classified, self.tokens = 0, 0, set[str | None]()
        self.naps_at_request, self.dies_at_request, self.has_died = False, False, False

    async def start(self) -> int:
        app = web.Application()
        app.router.add_get(UrlPath.READY.value, self._ready)
        app.router.add_post("/classify", self._classify)
        self.runner = web.AppRunner(app, shutdown_timeout=0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return int(self.runner.addresses[0][1])

    async def _ready(self, request: web.Request) -> web.Response:
        self.num_polls += 1
        return web.Response(status=200 if self.is_awake else 503)

    async def _classify(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("Authorization"))
        if self.naps_at_request:
            self.is_awake = False
        if not self.is_awake:
            return web.Response(status=503, text="the engine is asleep")
        if self.dies_at_request:
            self.is_awake, self.has_died = False, True
            assert request.transport is not None
            request.transport.abort()
        self.num_classified += 1
        return web.json_response({"data": [{"probs": self.outputs}], "usage": {"prompt_tokens": 3}})


@pytest.fixture
async def engines(monkeypatch, tmp_path):
    """Two engines of one Pod."""
    monkeypatch.setattr(shared_engines, "POLL_SECONDS", 0.01)
    started = [Engine(), Engine()]
    ports = [await engine.start() for engine in started]
    (tmp_path / "hosts").write_text("127.0.0.1 job-trainer\n")
    monkeypatch.setenv(ENV_HOSTS_FILE, str(tmp_path / "hosts"))
    monkeypatch.setenv(ENV_TOKEN, "secret")
    monkeypatch.setenv(ENV_VLLM_ENGINES, " ".join(f"job-trainer:{port}" for port in ports))
    yield started
    for engine in started:
        await engine.runner.cleanup()


async def until(condition):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def score(reward, completion):
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await reward.score(completion)


async def test_requests_go_to_all_engines_with_the_token(make_reward, engines):
    reward = await make_reward(REWARD)
    results = await asyncio.gather(*(score(reward, text) for text in "abcdefgh"))
    assert [(result.score, result.valid) for result in results] == [(0.5, True)] * 8
    assert all(engine.num_classified for engine in engines)
    assert engines[0].tokens == {"Bearer secret"}


async def test_server_starts_while_its_engines_sleep_and_its_requests_wait_for_their_turn(make_reward, engines):
    for engine in engines:
        engine.is_awake = False
    reward = await make_reward(REWARD | {"timeoutSeconds": 0.1})
    waiting = asyncio.create_task(score(reward, "four"))
    seen = engines[0].num_polls
    await until(lambda: engines[0].num_polls > seen + 15)  # for longer than timeoutSeconds
    assert not waiting.done()
    assert "asleep" in reward.executor.pool.notice
    assert reward.executor.pool.can_serve, "its Pod stays ready"
    for engine in engines:
        engine.is_awake = True
    assert (await waiting).score == 0.5
    assert reward.executor.pool.notice == ""


async def test_request_that_meets_a_sleeping_engine_is_no_failure(make_reward, engines):
    reward = await make_reward(REWARD)
    await until(lambda: engines[0].num_polls and engines[1].num_polls)
    for engine in engines:
        engine.naps_at_request = True
    result = await score(reward, "four")
    assert (result.valid, result.reason) == (False, "cancelled"), "the driver sends it again, without a retry"
    for engine in engines:
        engine.naps_at_request, engine.is_awake = False, True
    assert (await score(reward, "four")).score == 0.5


async def test_engine_that_dies_with_a_request_costs_no_sample_if_there_is_another(make_reward, engines):
    reward = await make_reward(REWARD)
    seen = [engine.num_polls for engine in engines]
    await until(lambda: all(engine.num_polls > polls + 2 for engine, polls in zip(engines, seen, strict=True)))
    engines[0].dies_at_request = True
    results = [await score(reward, text) for text in "ab"]
    assert engines[0].has_died
    assert [result.score for result in results] == [0.5, 0.5]


async def test_wrong_label_ends_the_server_at_the_first_answer(make_reward, engines):
    engines[0].outputs = engines[1].outputs = [0.1, 0.2]
    reward = await make_reward(REWARD)
    assert (await score(reward, "four")).reason == "bad_return"
    assert str(reward.executor.fatal_error.result()) == "model.label must be set: the model has 2 outputs, 0 to 1"
