"""A driver's status over HTTP, and how often it is requested."""

import asyncio

import pytest
from aiohttp import web

from rljob_api.wire.protocol import DriverStatus
from rljob_operator.kube.driver import DriverClient, DriverEndpoint


@pytest.fixture
async def serve(unused_tcp_port):
    """Start a driver that gives one answer; return a client for it."""
    runners, clients = [], []

    async def start(**answer):
        async def status(request):
            assert request.headers["Authorization"] == "Bearer secret"
            return web.Response(**answer)

        app = web.Application()
        app.router.add_get("/status", status)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", unused_tcp_port).start()
        clients.append(DriverClient(port=unused_tcp_port))
        return clients[-1]

    yield start
    for closing in (*(client.close() for client in clients), *(runner.cleanup() for runner in runners)):
        await closing


DRIVER = DriverEndpoint("u1", "127.0.0.1", "secret")


async def test_unknown_fields_of_a_newer_driver_are_ignored(serve):
    client = await serve(text='{"step": 3, "mood": "fine", "demand": {"correct": {"samples": 64, "colour": "red"}}}')
    status = await client.get_status(DRIVER)
    assert (status.step, status.demand["correct"].samples) == (3, 64)


@pytest.mark.parametrize("answer", [{"status": 503}, {"text": "no JSON"}, {"text": '{"step": "three"}'}])
async def test_invalid_answer_counts_as_none(serve, answer):
    client = await serve(**answer)
    assert await client.get_status(DRIVER) is None


async def test_driver_is_requested_again_only_when_its_answer_is_too_old():
    clock, client, requested_at = [0.0], DriverClient(clock=lambda: clock[0]), []

    async def get(driver):
        await asyncio.sleep(0)
        requested_at.append(clock[0])
        return DriverStatus(step=len(requested_at))

    client._request = get
    driver = DriverEndpoint("uid", "10.0.0.1", "t")
    for now, age in ((0.0, 10.0), (2.0, 10.0), (2.0, 2.0), (3.0, 2.0), (9.0, 10.0), (9.0, 2.0)):
        clock[0] = now
        await client.get_status(driver, age)
    assert requested_at == [0.0, 2.0, 9.0]
