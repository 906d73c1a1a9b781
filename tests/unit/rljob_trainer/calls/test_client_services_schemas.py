"""When the functions of a tool are read, and what is wrong with them."""

import asyncio

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.wire.calls import CallRequest
from tests.support.reward_harness import until
from tests.support.waiting import DEADLINE_SECONDS

ADD = CallRequest(id="e", function="add", arguments={})


def names(tools):
    return [schema.name for schema in tools.schemas]


async def test_functions_are_read_once_for_all_episodes(call_harness):
    server = await call_harness.serve("calc", "add", "mul")
    async with call_harness.services(tools={"calc": {}}) as services:
        found = await asyncio.gather(*(services.tools() for _ in range(50)))
    assert {tuple(names(tools)) for tools in found} == {("add", "mul")}
    assert server.num_infos == 1


async def test_unreachable_tool_is_waited_for(call_harness):
    async with call_harness.services(tools={"calc": {}}) as services:
        waiting = asyncio.create_task(services.tools())
        await until(lambda: services.clients["calc"].replicas.num_waiting)
        waiting.cancel()
        again = asyncio.create_task(services.tools())
        server = await call_harness.serve("calc", "add")
        server.info = lambda: web.Response(status=503) if server.num_infos < 3 else None
        assert names(await asyncio.wait_for(again, DEADLINE_SECONDS)) == ["add"]


async def test_functions_of_a_new_version_are_read_in_the_background(call_harness):
    server = await call_harness.serve("calc", "add")
    async with call_harness.services(tools={"calc": {}}) as services:
        assert names(await services.tools()) == ["add"]
        [reader] = services.readers.values()
        await services.call("calc", ADD)
        assert (reader.is_idle, server.num_infos) == (True, 1), "the same version"
        server.version, server.functions = "v2", ["add", "mul"]
        await services.call("calc", ADD)
        await until(lambda: server.num_infos == 2 and reader.is_idle)
        assert names(await services.tools()) == ["add", "mul"]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (web.Response(status=401, text="no token"), r"returned 401: no token"),
        (web.json_response({"version": "v1"}), r"has no functions; define one"),
        (web.json_response({"tools": [{"name": "add"}]}), r"has unusable functions: .*parameters"),
    ],
)
async def test_tool_without_usable_functions_is_a_user_error(call_harness, info, message):
    server = await call_harness.serve("calc", "add")
    server.info = lambda: info
    async with call_harness.services(tools={"calc": {}}) as services:
        with pytest.raises(UserError, match=rf"(?s)^spec.agent.tools\[0\]: {server.address} {message}"):
            await services.tools()
