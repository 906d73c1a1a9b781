"""The client of one service against real HTTP servers: retries, limits, and what it reports."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest
from tests.support.reward_harness import until

REQUEST = CallRequest(id="e/0/user_0", lane="eval", arguments={"messages": []})
INVALID = {"valid": False, "reason": "exception", "message": "user.py:3: KeyError: 'a'"}


async def call(services, service="user", request=REQUEST):
    result, _ = await services.call(service, request)
    return result


async def test_call_has_the_token_and_returns_the_value(call_harness):
    server = await call_harness.serve("user", value={"text": "Again."})
    async with call_harness.services(user={}) as services:
        result, seconds = await services.call("user", REQUEST)
    assert (result.value, seconds > 0) == ({"text": "Again."}, True)
    assert server.authorizations == ["Bearer secret"]


async def test_retry_has_the_same_id_and_another_replica(call_harness):
    servers = [await call_harness.serve("user") for _ in range(3)]
    for server in servers[:2]:
        server.answer = lambda body: INVALID
    servers[2].answer = lambda body: "hang up"
    async with call_harness.services(user={"retries": 1}) as services:
        await until(lambda: len(services.clients["user"].replicas.fleet.replicas) == 3)
        result = await call(services)
    assert (result.reason, result.message) == (InvalidReason.EXCEPTION, INVALID["message"])
    assert [len(server.bodies) for server in servers[:2]] == [1, 1], "a lost connection uses up no retry"
    assert {body["id"] for server in servers for body in server.bodies} == {REQUEST.id}


async def test_wrong_call_of_a_tool_is_not_retried(call_harness):
    server = await call_harness.serve("calc", "add")
    server.answer = lambda body: {"valid": False, "reason": "bad_request", "message": "a is missing"}
    async with call_harness.services(tools={"calc": {"retries": 5}}) as services:
        result = await call(services, "calc", CallRequest(id="e", function="add", arguments={}))
    assert (result.reason, len(server.bodies)) == (InvalidReason.BAD_REQUEST, 1)


async def test_full_or_stopping_replica_is_avoided(call_harness):
    full, stops, free = [await call_harness.serve("user") for _ in range(3)]
    full.answer = lambda body: web.Response(status=429, headers={"Retry-After": "60"})
    stops.answer = lambda body: {"valid": False, "reason": "cancelled", "message": "it shut down"}
    async with call_harness.services(user={"retries": 0}) as services:
        await until(lambda: len(services.clients["user"].replicas.fleet.replicas) == 3)
        results = [await call(services) for _ in range(6)]
    assert all(result.valid for result in results)
    assert (len(full.bodies), len(free.bodies)) == (1, 6)


@pytest.mark.parametrize("status", [401, 404, 422])
async def test_wrong_configuration_is_a_user_error(call_harness, status):
    server = await call_harness.serve("user")
    server.answer = lambda body: web.Response(status=status, text="no")
    async with call_harness.services(user={}) as services:
        with pytest.raises(UserError, match=rf"^spec.agent.user: {server.address} returned {status}: no"):
            await call(services)


async def test_call_ends_at_its_deadline_and_is_described_until_then(call_harness):
    server = await call_harness.serve("user")
    server.is_open.clear()
    async with call_harness.services(user={"deadlineSeconds": 0.3}) as services:
        calls = [asyncio.create_task(call(services)) for _ in range(3)]
        await until(lambda: len(server.bodies) == 3)
        assert services.describe_wait().startswith("3 replies of the user, oldest 0.")
        assert services.clients["user"].statistics()["in_flight"] == 3
        results = await asyncio.gather(*calls)
        assert services.describe_wait() == ""
    assert [result.reason for result in results] == [InvalidReason.DEADLINE] * 3


async def test_wait_names_the_tool_and_the_missing_replica(call_harness):
    async with call_harness.services(tools={"calc": {"deadlineSeconds": 0.2}}) as services:
        running = asyncio.create_task(call(services, "calc"))
        await until(lambda: services.describe_wait() != "")
        assert services.describe_wait().startswith("1 result of the tool calc, oldest 0.")
        assert services.describe_wait().endswith(", no replica exists")
        assert services.clients["calc"].statistics()["waiting"] == 1
        await call_harness.serve("calc", "add")
        assert (await running).valid, "the time without a replica is not the call's"


SCALED = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2}}


async def test_calls_of_an_autoscaled_service_wait_for_its_first_replica(call_harness):
    async with call_harness.services(user=SCALED) as services:
        running = asyncio.create_task(call(services))
        await until(lambda: services.describe_wait() != "")
        assert services.describe_wait().endswith(", no replica exists yet")
        load = services.loads()["user"]
        assert (load.in_flight, load.waiting, load.holds_slots) == (1, 1, False)
        assert load.total("eval").wait_seconds > 0
        await call_harness.serve("user", value={"text": "Again."})
        assert (await running).valid


async def test_functions_of_a_tool_wait_for_its_first_replica(call_harness):
    async with call_harness.services(tools={"calc": SCALED}) as services:
        running = asyncio.create_task(services.tools())
        await until(lambda: services.loads()["calc"].in_flight == 1)
        assert services.describe_wait() == "the functions of the tool calc, no replica exists yet"
        await call_harness.serve("calc", "add")
        assert (await running).owners == {"add": "calc"}
        assert services.loads()["calc"].in_flight == 0


async def test_load_has_the_calls_of_each_lane(call_harness):
    server = await call_harness.serve("user")
    server.answer = lambda body: {"valid": True, "execute_seconds": 2.0}
    kinds = []
    working = lambda kind: kinds.append(kind) or contextlib.nullcontext()  # noqa: E731
    async with call_harness.services(user={}, working=working) as services:
        await call(services)
        await call(services, request=REQUEST.model_copy(update={"lane": "train"}))
        await call(services, request=REQUEST.model_copy(update={"lane": "train"}))
        load = services.loads()["user"]
    assert (load.latency_seconds, load.latency_p95_seconds, load.in_flight) == (2.0, 2.0, 0)
    assert {lane: (each.num_calls, each.busy_seconds) for lane, each in load.totals.items()} == {
        "eval": (1, 2.0),
        "train": (2, 4.0),
    }
    assert kinds == ["user"] * 3


async def test_arguments_without_json_form_are_a_wrong_call(call_harness):
    await call_harness.serve("calc", "add")
    async with call_harness.services(tools={"calc": {}}) as services:
        result = await call(services, "calc", CallRequest(id="e", arguments={"a": float("nan")}))
    assert result.reason is InvalidReason.BAD_REQUEST


async def test_each_result_is_reported(call_harness):
    server = await call_harness.serve("user")
    server.answer = lambda body: INVALID
    found = []
    on_call = lambda *args: found.append(args[:3])  # noqa: E731
    async with call_harness.services(user={"retries": 0}, on_call=on_call) as services:
        result = await call(services)
    assert found == [("user", "eval", result)]
