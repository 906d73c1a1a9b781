"""Programs in the place of a driver that answer what no driver answers.

Each writes to one connection until the other side closes it. `num_bytes` is what the kernel took.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n"
_CHUNK = b" " * 65536
_BOMB_BYTES = 50_000_000
"""Inflated; 50 kB on the wire."""


class Connection:
    """One request. `write` returns when the other side has taken the bytes."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
        self.num_bytes += len(data)

    async def answer(self, body: bytes, headers: bytes = b"") -> None:
        await self.write(OK + headers + LENGTH % len(body) + body)


Behaviour = Callable[[Connection], Awaitable[None]]


async def compress(connection: Connection) -> None:
    await connection.answer(gzip.compress(b" " * _BOMB_BYTES), b"Content-Encoding: gzip\r\n")


async def send_forever(connection: Connection) -> None:
    await connection.write(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        await connection.write(b"%x\r\n" % len(_CHUNK) + _CHUNK + b"\r\n")


async def trickle(connection: Connection) -> None:
    await connection.write(OK + LENGTH % 1000)
    while True:
        await connection.write(b" ")
        await asyncio.sleep(0.05)


async def hang(connection: Connection) -> None:
    await asyncio.Event().wait()


async def redirect(connection: Connection) -> None:
    await connection.write(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/secret\r\nContent-Length: 0\r\n\r\n")


async def send_long_texts(connection: Connection) -> None:
    await connection.answer(json.dumps({"waits_for": "x" * 1_000_000}).encode())


async def nest(connection: Connection) -> None:
    await connection.answer(b'{"demand":' * 6000)


async def send_huge_header(connection: Connection) -> None:
    await connection.write(OK + b"X-Large: ")
    while True:
        await connection.write(b"x" * 65536)


async def send_many_headers(connection: Connection) -> None:
    await connection.write(OK)
    while True:
        await connection.write(b"X-Many: x\r\n" * 5000)


async def send_no_number(connection: Connection) -> None:
    await connection.answer(b'{"step": 1, "reward": NaN}')


async def send_huge_number(connection: Connection) -> None:
    await connection.answer(b'{"demand": {"r": {"samples": 1' + b"0" * 400 + b"}}}")


async def send_bytes(connection: Connection) -> None:
    await connection.answer(bytes(range(256)))


async def send_no_http(connection: Connection) -> None:
    await connection.write(b"\0\xff SSH-2.0\r\n\r\n")


PROBLEMS: dict[Behaviour, str] = {
    compress: "its Content-Encoding is gzip; it must not be compressed",
    send_forever: "it is larger than 64 KiB",
    send_long_texts: "it is larger than 64 KiB",
    trickle: "it is not complete after",
    hang: "it is not complete after",
    redirect: "its HTTP status is 302, not 200",
    nest: "Invalid JSON: recursion limit exceeded",
    send_huge_header: "its HTTP is invalid, or its headers are too large",
    send_many_headers: "its HTTP is invalid, or its headers are too large",
    send_no_number: "reward: Input should be a finite number",
    send_huge_number: "demand.r.samples: Input should be less than or equal to 1000000000",
    send_bytes: "Invalid JSON",
    send_no_http: "its HTTP is invalid, or its headers are too large",
}
"""What the operator says about each."""


@contextlib.asynccontextmanager
async def serve(behaviour: Behaviour, address: str, port: int) -> AsyncIterator[list[Connection]]:
    """Serve until the end of the context. Yields the connections so far."""
    connections: list[Connection] = []
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        connections.append(Connection(writer))
        try:
            with contextlib.suppress(ConnectionError, EOFError, asyncio.CancelledError):
                await reader.readuntil(b"\r\n\r\n")
                await behaviour(connections[-1])
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(handle, address, port)
    try:
        yield connections
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
