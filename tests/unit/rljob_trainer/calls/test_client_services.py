"""All services of an agent together."""

import asyncio

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.wire.contract import END_EPISODE
from tests.support.waiting import DEADLINE_SECONDS


async def test_functions_of_all_tools_are_in_the_order_of_the_job(call_harness):
    await call_harness.serve("calc", "mul", "add")
    await call_harness.serve("clock", "now")
    async with call_harness.services(tools={"clock": {}, "calc": {}}) as services:
        tools = await services.tools()
    assert [schema.name for schema in tools.schemas] == ["now", "mul", "add"]
    assert tools.owners == {"now": "clock", "mul": "calc", "add": "calc"}


async def test_two_tools_with_the_same_function_are_a_user_error_with_both(call_harness):
    await call_harness.serve("calc", "add")
    await call_harness.serve("abacus", "add")
    async with call_harness.services(tools={"calc": {}, "abacus": {}}) as services:
        with pytest.raises(UserError) as caught:
            await services.tools()
    assert str(caught.value) == (
        "spec.agent.tools[0] (calc) and spec.agent.tools[1] (abacus) both have a function add; rename one"
    )


async def test_agent_without_tools_has_none(call_harness):
    async with call_harness.services(user={}) as services:
        assert (await services.tools()).schemas == []


async def test_end_of_an_episode_is_one_more_call_in_the_background(call_harness):
    server = await call_harness.serve("calc", "add")
    called = asyncio.Event()
    server.answer = lambda body: called.set()
    on_call = lambda *found: pytest.fail("the policy did not call it")  # noqa: E731
    async with call_harness.services(tools={"calc": {}}, on_call=on_call) as services:
        services.end_episode("calc", "g/train/1", "train")
        assert server.bodies == [], "it returns at once"
        await asyncio.wait_for(called.wait(), DEADLINE_SECONDS)
    [body] = server.bodies
    assert (body["function"], body["episode"], body["lane"]) == (END_EPISODE, "g/train/1", "train")


@pytest.mark.parametrize("answer", [{"valid": False, "reason": "exception", "message": "403"}, None])
async def test_episode_that_a_tool_cannot_end_is_in_the_log_alone(call_harness, caplog, answer):
    server = await call_harness.serve("calc", "add")
    server.answer = lambda body: answer or web.Response(status=400, text="403")
    async with call_harness.services(tools={"calc": {"retries": 0}}) as services:
        services.end_episode("calc", "g/train/1", "train")
        await asyncio.wait(services._ending, timeout=DEADLINE_SECONDS)
    assert "tool calc still holds what it had for the episode g/train/1: " in caplog.text
    assert "403" in caplog.text


async def test_episodes_that_end_do_not_delay_the_end_of_the_job(call_harness):
    server = await call_harness.serve("calc", "add")
    server.is_open.clear()
    async with call_harness.services(tools={"calc": {}}) as services:
        services.end_episode("calc", "g/train/1", "train")
        (ending,) = services._ending
    assert ending.cancelled()
