"""What a driver says of itself, asked over HTTP."""

import pytest
from aiohttp import web

from rljob_operator.kube.driver import Driver, DriverClient


@pytest.fixture
async def serve(unused_tcp_port):
    """Starts a driver that gives one answer; the operator's client of it."""
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


DRIVER = Driver("u1", "127.0.0.1", "secret")


async def test_a_newer_driver_may_say_more_than_this_operator_knows(serve):
    client = await serve(text='{"step": 3, "mood": "fine", "demand": {"correct": {"samples": 64, "colour": "red"}}}')
    said = await client.ask(DRIVER)
    assert (said.step, said.demand["correct"].samples) == (3, 64)


@pytest.mark.parametrize("answer", [{"status": 503}, {"text": "no JSON"}, {"text": '{"step": "three"}'}])
async def test_a_driver_that_says_nothing_of_use_has_not_answered(serve, answer):
    client = await serve(**answer)
    assert await client.ask(DRIVER) is None
