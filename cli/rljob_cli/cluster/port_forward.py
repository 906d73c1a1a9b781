"""Ports of a Pod on this machine, as `kubectl port-forward` has them: each connection is a WebSocket to the API server.

Needs the verb create on pods/portforward. The kubelet connects inside the Pod, so NetworkPolicies do not matter, and
the API server changes no header, unlike its Pod proxy, which removes tokens.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import aiohttp

from rljob_api.errors import RLJobError
from rljob_cli.cluster.client import Cluster

_DATA, _ERROR = 0, 1
"""The channels of a connection's only port. Each begins with the port, in two bytes."""
_CHUNK_BYTES = 64 * 1024


class ForwardedPort(NamedTuple):
    url: str
    problems: list[RLJobError]
    """Why the last connection failed, such as a missing right; empty if it did not."""


@contextlib.asynccontextmanager
async def forward_port(
    cluster: Cluster, find_pod: Callable[[], Awaitable[str]], port: int
) -> AsyncIterator[ForwardedPort]:
    """Yield the URL on this machine behind which a port of the Pod is that `find_pod` names, at each connection: Pods
    are replaced."""
    problems: list[RLJobError] = []

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with cluster.open_port(await find_pod(), port) as socket:
                problems.clear()
                await pipe(socket, reader, writer)
        except RLJobError as error:
            problems[:] = [error]
        except (OSError, aiohttp.ClientError):
            pass  # the connection ends, as if the Pod had closed it
        finally:
            writer.close()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    async with server:
        yield ForwardedPort(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", problems)


async def pipe(
    socket: aiohttp.ClientWebSocketResponse, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Copy both directions until either side ends."""
    tasks = [asyncio.create_task(_send(socket, reader)), asyncio.create_task(_receive(socket, writer))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send(socket: aiohttp.ClientWebSocketResponse, reader: asyncio.StreamReader) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        await socket.send_bytes(bytes([_DATA]) + chunk)


async def _receive(socket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    begun: set[int] = set()
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel not in begun:
            begun.add(channel)
            data = data[2:]
        if channel == _ERROR and data:
            return  # nothing listens there
        if channel == _DATA and data:
            writer.write(data)
            await writer.drain()
