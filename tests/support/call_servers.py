"""Servers of a simulated user or a tool in this process, for tests of the client of calls. Real HTTP on loopback."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from contextlib import asynccontextmanager

from aiohttp import web

from rljob_api.manifest.agent import Agent
from rljob_api.manifest.job_spec import Service
from rljob_api.wire.calls import CallResult, ToolSchema
from rljob_trainer.calls.client import AgentServices
from rljob_trainer.replicas.http import open_session
from tests.support.hosted_episodes import make_program
from tests.support.seconds import restore, round_up
from tests.support.stub_server import StubServer

_numbers = itertools.count(1)


def schema(name):
    return ToolSchema(name=name, parameters={"type": "object", "properties": {}}).model_dump()


class CallServer(StubServer):
    """Returns `value` unless `answer` returns a CallResult's fields or a response."""

    def __init__(self, address, functions=(), value="ok", version="v1"):
        super().__init__(address)
        self.functions, self.value, self.version = list(functions), value, version
        self.bodies, self.authorizations, self.num_infos = [], [], 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.answer = lambda body: None
        self.info = lambda: None

    def routes(self):
        return [web.get("/v1/info", self._info), web.post("/v1/call", self._call)]

    async def _info(self, request):
        self.num_infos += 1
        found = self.info()
        if isinstance(found, web.Response):
            return found
        tools = {"tools": [schema(name) for name in self.functions]} if self.functions else {}
        return web.json_response({"version": self.version, **tools})

    async def _call(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("Authorization"))
        await self.is_open.wait()
        found = self.answer(body)
        if found == "hang up":
            request.transport.abort()
            return web.Response()
        if isinstance(found, web.Response):
            return found
        fields = {"valid": True, "value": self.value} if found is None else found
        result = CallResult(id=body["id"], version=self.version, **fields)
        return web.json_response(result.model_dump(mode="json"))


def _build_agent(user, tools):
    source = {"function": {"inline": "x"}}
    users = {} if user is None else {"user": {**source, **user}}
    return Agent.model_validate(
        {"type": "loop", **users, "tools": [{"name": name, **source, **fields} for name, fields in tools.items()]}
    )


class CallHarness:
    """Servers by service, and the hosts file that lists them."""

    def __init__(self, folder, monkeypatch):
        self._hosts = folder / "hosts"
        self._network = f"127.{40 + os.getpid() % 80}.{next(_numbers) % 250}"
        self._servers = []
        self._listed = []
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("RLJOB_HOSTS_FILE", str(self._hosts))
        monkeypatch.setenv("RLJOB_TOKEN", "secret")
        self.list()

    async def serve(self, service, *functions, **fields):
        """Start one more replica of a service, and list it."""
        server = CallServer(f"{self._network}.{len(self._servers) + 1}", functions, **fields)
        self._servers.append(server)
        await server.start()
        self.list((service, server))
        return server

    def list(self, *added, without=()):
        self._listed = [(name, each) for name, each in [*self._listed, *added] if each not in without]
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(f"{server.address} {name}\n" for name, server in self._listed))
        new.replace(self._hosts)

    @asynccontextmanager
    async def services(self, *, user=None, tools=None, runner=None, **callbacks):
        """Yield the services of an agent. `user`: fields of agent.user, None without one; `tools`: fields by name;
        `runner`: fields of agent.runner of a program. `callbacks`: see AgentServices."""
        whole = round_up({"user": user, "tools": tools or {}, "runner": runner})
        agent = _build_agent(whole["user"], whole["tools"]) if runner is None else make_program(runner=whole["runner"])
        given = {"user": user, "runner": runner}
        names = [*(name for name, fields in given.items() if fields is not None), *(tools or {})]
        self._monkeypatch.setenv("RLJOB_REWARD_SERVICES", json.dumps({name: name for name in names}))
        listed = [Service("user", "spec.agent.user", agent.user.build_service())] if agent.user else []
        for index, tool in enumerate(agent.tools):
            listed.append(Service("tool", f"spec.agent.tools[{index}]", tool.build_service()))
        if agent.runner_settings:
            listed.append(Service("runner", "spec.agent.runner", agent.runner_settings))
        for service in listed:
            restore(service.settings, {"user": user, "runner": runner, **(tools or {})}[service.settings.name])
        async with open_session() as session:
            services = AgentServices(listed, session, **callbacks)
            await services.start()
            try:
                yield services
            finally:
                await services.close()

    async def close(self):
        for server in self._servers:
            server.is_open.set()
            await server.stop()
