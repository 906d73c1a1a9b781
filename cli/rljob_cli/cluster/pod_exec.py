"""A command in a Pod's container, over the API server's WebSocket: `kubectl exec -i`.

The first byte of each message is its channel. Protocol v4 cannot close stdin, so the command must know where its input
ends. Invariant: what the command prints is read while its input is sent, or both would wait for each other.
"""

import asyncio
import json
from collections.abc import Iterable
from typing import NamedTuple

import aiohttp

from rljob_api.errors import RLJobError, TransientError

PROTOCOL = "v4.channel.k8s.io"
_STDIN, _STATUS = 0, 3
"""1 and 2 are stdout and stderr."""
_MAX_OUTPUT_BYTES = 64 * 1024


class Ended(NamedTuple):
    exit_code: int
    output: str
    """The first part of stdout and stderr."""


async def execute(socket: aiohttp.ClientWebSocketResponse, stdin: Iterable[bytes]) -> Ended:
    """Send the input and return how the command ended. Raise TransientError if the connection ends first."""
    sender = asyncio.create_task(_send(socket, stdin))
    try:
        return await _receive(socket)
    except TransientError:
        [failure] = await asyncio.gather(sender, return_exceptions=True)  # ends, because the socket is closed
        if isinstance(failure, RLJobError):
            raise failure from None
        raise
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def _send(socket: aiohttp.ClientWebSocketResponse, stdin: Iterable[bytes]) -> None:
    try:
        for chunk in stdin:
            await socket.send_bytes(bytes([_STDIN]) + chunk)
    except Exception:
        await socket.close()  # the command would wait for the rest
        raise


async def _receive(socket: aiohttp.ClientWebSocketResponse) -> Ended:
    output = b""
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or len(message.data) < 2:
            continue  # each channel starts with an empty message
        channel, data = message.data[0], message.data[1:]
        if channel == _STATUS:
            return Ended(_parse_exit_code(json.loads(data)), output.decode(errors="replace"))
        output = (output + data)[:_MAX_OUTPUT_BYTES]
    raise TransientError("the connection to the Pod ended before the command did")


def _parse_exit_code(status: dict[str, object]) -> int:
    """Return the exit code in a Status. Raise TransientError if the command did not run."""
    if status.get("status") == "Success":
        return 0
    details = status.get("details")
    for cause in details.get("causes") or [] if isinstance(details, dict) else []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise TransientError(f"the command did not run: {status.get('message')}")
