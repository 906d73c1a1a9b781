"""Reward servers in this process, for tests of the reward clients.

They use real HTTP on loopback addresses; a hosts file replaces DNS. A test replaces the function that makes responses.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.scores import GroupRequest, GroupResult, ScoreRequest, ScoreResult
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.groups import RewardClients
from tests.support import seconds
from tests.support.stub_server import StubServer
from tests.support.waiting import DEADLINE_SECONDS

_numbers = itertools.count(1)


async def until(condition):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def make_reward(**fields):
    return seconds.validate(Reward, {"name": "r", "function": {"inline": "x"}, **fields})


def make_request(i, completion=None, **fields):
    return ScoreRequest(id=f"s{i}", prompt="p", completion=str(i) if completion is None else completion, **fields)


async def score_alone(rewards, request):
    """Return the results of all rewards for a sample that is its own group."""
    return await rewards.open_group(request.id, request.lane, 1).score(0, request)


class Decoder:
    """A tokenizer whose tokens are numbers."""

    def decode(self, token_ids, *, skip_special_tokens):
        return " ".join(map(str, token_ids))


class RewardServer(StubServer):
    """A reward whose score is the completion, a number, unless `fault` returns something else."""

    def __init__(self, address, version="v1"):
        super().__init__(address)
        self.version, self.reads = version, []
        self.asked, self.groups, self.num_left = [], [], 0
        self.connections, self.most_connected = set(), 0
        self.open = asyncio.Event()
        self.open.set()
        self.fault = lambda body: None
        """A ScoreResult's fields, or a Response, or None."""
        self.judge_group = lambda samples, results: [float(sample.completion) for sample in samples]

    def routes(self):
        return [
            web.get("/v1/info", self._info),
            web.post("/v1/score", self._score),
            web.post("/v1/score-group", self._score_group),
        ]

    async def _info(self, request):
        return web.json_response({"name": "r", "version": self.version, "reads": self.reads})

    async def _pass(self, request):
        self.connections.add(request.transport)
        self.most_connected = max(self.most_connected, self.num_connected)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    async def _score(self, request):
        body = await request.json()
        self.asked.append(body["id"])
        await self._pass(request)
        answer = self.fault(body)
        if isinstance(answer, web.Response):
            return answer
        fields = answer or {"valid": True, "score": float(body["completion"]), "components": {"alone": 1.0}}
        result = ScoreResult(id=body["id"], version=self.version, execute_seconds=1.0, **fields)
        return web.json_response(result.model_dump(mode="json"))

    async def _score_group(self, request):
        body = await request.json()
        group = GroupRequest.model_validate(body)
        self.groups.append(group)
        await self._pass(request)
        answer = self.fault(body)
        if isinstance(answer, web.Response):
            return answer
        results = []
        for sample, judged in zip(group.samples, self.judge_group(group.samples, group.results), strict=True):
            fields = (
                {"valid": False, "reason": judged, "message": "invalid"}
                if isinstance(judged, str)
                else {"valid": True, "score": judged, "components": {"together": 2.0}}
            )
            results.append(ScoreResult(id=sample.id, version=self.version, execute_seconds=3.0, **fields))
        return web.json_response(GroupResult(id=group.id, results=results).model_dump(mode="json"))

    @property
    def num_connected(self):
        return sum(not transport.is_closing() for transport in self.connections)


class RewardHarness:
    """Reward servers, and the hosts file that lists them."""

    def __init__(self, folder: Path, monkeypatch):
        self._network = f"127.62.{1 + os.getpid() % 200}"
        self._hosts = folder / "hosts"
        self.servers = []
        monkeypatch.setenv("RLJOB_HOSTS_FILE", str(self._hosts))
        monkeypatch.setenv("RLJOB_TOKEN", "secret")
        monkeypatch.setenv("RLJOB_REWARD_SERVICES", json.dumps(dict.fromkeys(("r", "s", "t"), "rewards")))
        self.list()

    async def serve(self, version="v1"):
        server = RewardServer(f"{self._network}.{next(_numbers) % 250 + 1}", version)
        await server.start()
        self.servers.append(server)
        return server

    def list(self, *servers):
        """List only `servers` in DNS."""
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(f"{server.address} rewards\n" for server in servers))
        new.replace(self._hosts)

    @asynccontextmanager
    async def rewards(self, *specs):
        async with open_session() as session:
            rewards = RewardClients(specs, session, Decoder())
            await rewards.start()
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    yield rewards
            finally:
                await rewards.close()

    async def close(self):
        for server in self.servers:
            await server.stop()
