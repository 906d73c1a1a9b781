"""All services of an agent together."""

import pytest

from rljob_api.errors import UserError


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
