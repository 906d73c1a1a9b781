"""Connections of the reward server: what a client may send, keep open and expect, before and after it has the token."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rljob_service.http import server as http
from rljob_service.http.server import MAX_HEAD_BYTES, HttpServer, Request
from tests.support.waiting import DEADLINE_SECONDS

GET = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"


class Handler:
    """Echoes bodies. Requests of /wait are answered by the test; those with the header `Authorization: no` never."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.statuses: list[int] = []
        self.num_handled = 0

    def admit(self, request: Request) -> int:
        if request.path.startswith(b"/open"):
            return 0
        if request.authorization == b"no":
            request.reject(401, "no token")
        request.record_authenticated()
        return 10

    def handle(self, request: Request) -> None:
        self.num_handled += 1
        if request.path == b"/wait":
            self.waiting.append(request)
        elif request.path == b"/bug":
            raise RuntimeError("a bug")
        else:
            request.respond(200, request.path + request.body)

    def record_response(self, status: int) -> None:
        self.statuses.append(status)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read_response(self) -> tuple[int, bytes]:
        async with asyncio.timeout(DEADLINE_SECONDS):
            head = await self._reader.readuntil(b"\r\n\r\n")
            [length] = [int(line.split()[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line]
            return int(head.split()[1]), await self._reader.readexactly(length)

    async def read_until_closed(self) -> bytes:
        async with asyncio.timeout(DEADLINE_SECONDS):
            with contextlib.suppress(ConnectionError):
                return await self._reader.read()
            return b""


class Connector:
    """A server and its clients."""

    def __init__(self, handler: Handler, server: HttpServer, address: tuple[str, int]) -> None:
        self.handler = handler
        self.server = server
        self._address = address
        self._clients: list[Client] = []

    async def connect(self, data: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection(*self._address))
        self._clients.append(client)
        client.send(data)
        return client

    async def wait_for(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 - the server sends no event
                await asyncio.sleep(0.001)

    def close(self) -> None:
        for client in self._clients:
            client.writer.close()


Start = Callable[..., Awaitable[Connector]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    connectors: list[Connector] = []

    async def build(max_connections: int = 100) -> Connector:
        listener = socket.create_server(("127.0.0.1", 0))
        handler = Handler()
        server = HttpServer(handler, max_connections)
        await server.listen(listener)
        connectors.append(Connector(handler, server, listener.getsockname()))
        return connectors[-1]

    yield build
    for connector in connectors:
        connector.close()
        await connector.server.close(0)


async def test_requests_of_one_connection_are_answered_in_turn(start: Start) -> None:
    client = await (await start()).connect()
    for path in (b"/a", b"/b?query=1"):
        client.send(GET % path)
        assert await client.read_response() == (200, path.partition(b"?")[0])


async def test_pipelined_requests_are_answered_in_their_order(start: Start) -> None:
    connector = await start()
    client = await connector.connect(GET % b"/wait" + b"".join(GET % (b"/%d" % n) for n in range(3)) + GET % b"/wait")
    await connector.wait_for(lambda: connector.handler.waiting)
    assert connector.handler.num_handled == 1, "the others wait for the first response"
    connector.handler.waiting.pop().respond(200, b"first")
    assert [await client.read_response() for _ in range(4)] == [(200, b"first"), *((200, b"/%d" % n) for n in range(3))]
    await connector.wait_for(lambda: connector.handler.waiting)
    connector.handler.waiting[0].respond(200, b"last")
    assert await client.read_response() == (200, b"last")
    client.send(GET % b"/again")
    assert await client.read_response() == (200, b"/again"), "reading has resumed"


async def test_pipeline_without_end_is_answered_a_request_a_turn_and_not_read_further(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, turns, loop = await start(), [0], asyncio.get_running_loop()
    turn_of_request: list[int] = []

    def count_turns() -> None:
        turns[0] += 1
        loop.call_soon(count_turns)

    def handle(request: Request) -> None:
        turn_of_request.append(turns[0])
        request.respond(200, b"")

    monkeypatch.setattr(connector.handler, "handle", handle)
    count_turns()
    flood = await connector.connect(b"".join(GET % (b"/%d" % n) for n in range(5_000)))
    await flood.read_until_closed()
    assert len(turn_of_request) == 1 + http._MAX_PIPELINED
    assert len(set(turn_of_request)) >= http._MAX_PIPELINED, "others have their turns between"


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 4\r\n\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("size", [1, 1000])
async def test_offer_of_another_protocol_is_ignored_and_the_body_is_read(
    start: Start, framing: bytes, size: int
) -> None:
    client = await (await start()).connect()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    data = b"POST /x HTTP/1.1\r\nAuthorization: yes\r\n" + offer + framing + GET % b"/next"
    for at in range(0, len(data), size):
        client.send(data[at : at + size])
        await asyncio.sleep(0)
    assert await client.read_response() == (200, b"/xbody")
    assert await client.read_response() == (200, b"/next")


async def test_offer_of_another_protocol_with_the_wrong_token_is_refused(start: Start) -> None:
    offer = b"Authorization: no\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    client = await (await start()).connect(b"GET /x HTTP/1.1\r\n" + offer)
    assert (await client.read_response())[0] == 401


@pytest.mark.parametrize("size", [1, 7])
async def test_request_in_parts_is_put_together(start: Start, size: int) -> None:
    client = await (await start()).connect()
    data = b"POST /x HTTP/1.1\r\nAuthorization: yes\r\nContent-Length: 10\r\n\r\n0123456789"
    for at in range(0, len(data), size):
        client.send(data[at : at + size])
        await asyncio.sleep(0)
    assert await client.read_response() == (200, b"/x0123456789")


async def test_chunked_body_is_put_together(start: Start) -> None:
    chunks = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    client = await (await start()).connect(b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert await client.read_response() == (200, b"/xabcde")


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1\r\nConnection: close"])
async def test_connection_ends_after_the_response_if_the_client_wants_that(start: Start, version: bytes) -> None:
    client = await (await start()).connect(b"GET /x " + version + b"\r\n\r\n")
    answer = await client.read_until_closed()
    assert answer.endswith(b"connection: close\r\n\r\n/x"), answer


async def test_response_to_head_has_no_body(start: Start) -> None:
    client = await (await start()).connect(b"HEAD /x HTTP/1.1\r\nConnection: close\r\n\r\n")
    answer = await client.read_until_closed()
    assert b"content-length: 2\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_client_that_expects_it_is_asked_to_continue(start: Start) -> None:
    head = b"POST /x HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n"
    connector = await start()
    client = await connector.connect(head + b"\r\n")
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await client._reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"ab")
    assert await client.read_response() == (200, b"/xab")
    rejected = await connector.connect(head + b"Authorization: no\r\n\r\n")
    assert (await rejected.read_response())[0] == 401


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (b"GET /", b"x"),
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
        (b"GET / HTTP/1.1\r\na: ", b"b"),
        (b"GET / HTTP/1.1\r\n", b"a"),
    ],
    ids=["request line", "headers", "value", "name"],
)
async def test_endless_head_is_refused(start: Start, begin: bytes, endless: bytes) -> None:
    connector = await start()
    client = await connector.connect(begin)
    client.send(endless * (2 * MAX_HEAD_BYTES // len(endless)))
    assert (await client.read_response())[0] == 431
    assert connector.handler.num_handled == 0


async def test_what_is_not_http_is_refused(start: Start) -> None:
    connector = await start()
    client = await connector.connect(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
    assert (await client.read_response())[0] == 400
    assert connector.handler.statuses == [400]


async def test_request_line_without_a_version_is_refused(start: Start) -> None:
    client = await (await start()).connect(b"GET /a\r\n\r\n")
    status, body = await client.read_response()
    assert (status, b"no version" in body) == (400, True)


async def test_rest_of_a_refused_request_is_not_answered_either(start: Start) -> None:
    head = b"POST /a HTTP/1.1\r\nAuthorization: no\r\nTransfer-Encoding: chunked\r\n\r\n"
    client = await (await start()).connect(head + b"not a size\r\n")
    client.writer.write_eof()
    received = await client.read_until_closed()
    assert received.startswith(b"HTTP/1.1 401")
    assert received.count(b"HTTP/1.1") == 1


async def test_body_of_a_rejected_request_is_discarded(start: Start) -> None:
    connector = await start()
    client = await connector.connect(b"POST /x HTTP/1.1\r\nAuthorization: no\r\nContent-Length: 10000000\r\n\r\n")
    assert (await client.read_response())[0] == 401
    [connection] = connector.server._connections
    client.send(b"x" * 1_000_000)
    async with asyncio.timeout(DEADLINE_SECONDS):
        await client.writer.drain()
    assert connection._chunks == []
    assert connector.handler.num_handled == 0


async def test_body_above_the_limit_is_refused(start: Start) -> None:
    connector = await start()
    client = await connector.connect(b"POST /x HTTP/1.1\r\nContent-Length: 11\r\n\r\n01234567890")
    assert (await client.read_response())[0] == 413
    assert connector.handler.num_handled == 0


async def test_error_in_the_handler_ends_only_its_connection(start: Start) -> None:
    connector = await start()
    assert await (await connector.connect(GET % b"/bug")).read_until_closed() == b""
    assert await (await connector.connect(GET % b"/x")).read_response() == (200, b"/x")


async def test_handler_learns_that_a_client_has_left(start: Start) -> None:
    connector = await start()
    client = await connector.connect(GET % b"/wait")
    await connector.wait_for(lambda: connector.handler.waiting)
    [request] = connector.handler.waiting
    left: list[bool] = []
    request.call_when_left(lambda: left.append(request.is_disconnected()))
    client.writer.close()
    await connector.wait_for(lambda: left)
    assert left == [True]
    request.respond(200, b"too late")


@pytest.mark.parametrize("begin", [b"", b"GET /x HT", b"POST /x HTTP/1.1\r\nContent-Length: 10\r\n\r\n012"])
async def test_connection_that_sends_too_slowly_is_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(http, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(http, "RECEIVE_SECONDS", 5)
    connector = await start()
    working = await connector.connect(GET % b"/wait")
    slow = await connector.connect(begin)
    assert await slow.read_until_closed() == b""
    connector.handler.waiting[0].respond(200, b"in time")
    assert await working.read_response() == (200, b"in time"), "a request that is executed has no limit here"
    working.send(begin)
    if begin:
        assert await working.read_until_closed() == b"", "nor has a later request more time"


async def test_request_may_be_answered_after_hours(start: Start) -> None:
    connector = await start()
    client = await connector.connect(GET % b"/wait")
    await connector.wait_for(lambda: connector.handler.waiting)
    for _ in range(http.IDLE_SECONDS + http.RECEIVE_SECONDS):
        connector.server._on_tick()
    connector.handler.waiting.pop().respond(200, b"late")
    assert await client.read_response() == (200, b"late")


async def test_idle_connection_is_closed_after_a_while(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(http, "IDLE_SECONDS", 5)
    client = await (await start()).connect(GET % b"/x")
    assert await client.read_response() == (200, b"/x")
    assert await client.read_until_closed() == b""


async def test_request_that_began_during_an_earlier_one_is_not_idle(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = await start()
    client = await connector.connect(GET % b"/wait" + b"GET /wait HT")
    await connector.wait_for(lambda: connector.handler.waiting)
    connector.handler.waiting.pop().respond(200, b"first")
    assert await client.read_response() == (200, b"first")
    client.send(b"TP/1.1\r\n\r\n")
    await connector.wait_for(lambda: connector.handler.waiting)
    idle = await connector.connect(GET % b"/x")
    await idle.read_response()
    monkeypatch.setattr(http, "IDLE_SECONDS", 0)
    connector.server._on_tick()
    assert await idle.read_until_closed() == b""
    connector.handler.waiting[0].respond(200, b"second")
    assert await client.read_response() == (200, b"second")


async def test_connections_without_the_token_make_room_for_others(start: Start) -> None:
    connector = await start(max_connections=3)
    working = await connector.connect(GET % b"/wait")
    await connector.wait_for(lambda: connector.handler.waiting)
    idle = await connector.connect(GET % b"/x")
    await idle.read_response()
    strangers = [await connector.connect(GET % b"/open") for _ in range(5)]
    for stranger in strangers[:4]:
        await stranger.read_until_closed()
    assert len(connector.server._connections) == 3
    idle.send(GET % b"/y")
    assert await idle.read_response() == (200, b"/y")
    connector.handler.waiting[0].respond(200, b"done")
    assert await working.read_response() == (200, b"done")


async def test_idle_connections_make_room_for_a_new_one(start: Start) -> None:
    connector = await start(max_connections=2)
    clients = []
    for _ in range(3):
        clients.append(await connector.connect(GET % b"/x"))
        assert (await clients[-1].read_response())[0] == 200
    assert await clients[0].read_until_closed() == b""


async def test_closing_ends_slow_and_idle_connections_at_once_and_waits_for_responses(start: Start) -> None:
    connector = await start()
    slow = [
        await connector.connect(begin)
        for begin in (b"", b"GET /x", b"POST /open HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
    ]
    idle = await connector.connect(GET % b"/x")
    await idle.read_response()
    working = await connector.connect(GET % b"/wait")
    await connector.wait_for(lambda: connector.handler.waiting)
    closing = asyncio.create_task(connector.server.close(timeout_seconds=DEADLINE_SECONDS))
    for client in (*slow, idle):
        assert await client.read_until_closed() == b""
    assert not closing.done()
    connector.handler.waiting[0].respond(200, b"done")
    assert (await working.read_until_closed()).endswith(b"connection: close\r\n\r\ndone")
    await asyncio.wait_for(closing, DEADLINE_SECONDS)


async def test_closing_does_not_wait_longer_than_its_time(start: Start) -> None:
    connector = await start()
    client = await connector.connect(GET % b"/wait")
    await connector.wait_for(lambda: connector.handler.waiting)
    await asyncio.wait_for(connector.server.close(timeout_seconds=0.01), DEADLINE_SECONDS)
    assert await client.read_until_closed() == b""
