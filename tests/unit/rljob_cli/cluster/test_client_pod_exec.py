"""Commands in Pods, over a WebSocket as the API server has it."""

from __future__ import annotations

import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob_api.errors import TransientError, UserError
from rljob_cli.cluster.client import PROTOCOL, execute

SUCCESS = {"status": "Success"}
FAILURE = {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}}


async def run(stdin, respond):
    """Execute with a server that answers with `respond(socket)`; return how it ended."""

    async def handle(request):
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        for channel in range(4):  # as the API server: each output channel starts with an empty message
            await socket.send_bytes(bytes([channel]))
        await respond(socket)
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/exec", handle)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession() as session,
        session.ws_connect(server.make_url("/exec"), protocols=(PROTOCOL,)) as socket,
    ):
        return await execute(socket, stdin)


async def send_status(socket, status):
    await socket.send_bytes(b"\x03" + json.dumps(status).encode())


async def test_input_is_sent_and_output_and_exit_code_are_returned():
    received = []

    async def respond(socket):
        received.extend([await socket.receive_bytes() for _ in range(2)])
        await socket.send_bytes(b"\x01out ")
        await socket.send_bytes(b"\x02err")
        await send_status(socket, FAILURE)

    ended = await run([b"one", b"two"], respond)
    assert received == [b"\x00one", b"\x00two"]
    assert ended == (7, "out err")


async def test_command_that_reads_no_input_ends():
    async def respond(socket):
        await send_status(socket, SUCCESS)

    assert (await run([bytes(2**20)] * 64, respond)).exit_code == 0


async def test_error_of_the_input_is_raised():
    def broken():
        yield b"first"
        raise UserError("has changed")

    async def respond(socket):
        async for _ in socket:
            pass

    with pytest.raises(UserError, match="has changed"):
        await run(broken(), respond)


async def test_connection_that_ends_first_is_transient():
    async def respond(socket):
        await socket.send_bytes(b"\x01part")

    with pytest.raises(TransientError, match="ended before the command did"):
        await run([], respond)


async def test_command_that_cannot_start_is_transient():
    async def respond(socket):
        await send_status(socket, {"status": "Failure", "message": "no such container"})

    with pytest.raises(TransientError, match="the command did not run: no such container"):
        await run([], respond)
