"""Serves weight files over HTTP, whole, by ranges, and with the hashes of their chunks.

The publisher and the replicas serve the same two paths, so a receiver may use any source. The owner decides which file
is served, and when it may change. A receiver verifies every chunk, so a file that changes while it is sent costs one
attempt.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from aiohttp import web

from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_api.wire.discovery import listening_port
from rljob_trainer.server_thread import ServerThread, require_token

FILE_PATH, HASHES_PATH = "/weights/{name}", "/weights/{name}/hashes"
_SEND_BYTES = 1 << 20


@dataclass
class ServedFile:
    data: memoryview
    """Its content, mapped."""
    hashes: bytes | bytearray
    """Hashes of all chunks (see `file_hash`); zeros for a chunk that the file does not have yet."""


class WeightServer:
    """Serves in a separate thread, from construction to close(). Every request needs the token."""

    def __init__(self, host: str, token: str, find: Callable[[str], AbstractContextManager[ServedFile | None]]) -> None:
        """`find`: returns the file of this name until the response ends; None if there is none. Raise OSError if the
        port is in use."""
        self._find = find
        app = web.Application(middlewares=[require_token(token)])
        app.router.add_get(FILE_PATH, self._get_file)
        app.router.add_get(HASHES_PATH, self._get_hashes)
        self._server = ServerThread(app, host, listening_port(PORT_WEIGHTS))

    def close(self) -> None:
        self._server.close()

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        with self._find(request.match_info["name"]) as file:
            data = _check(file).data
            try:
                part = data[request.http_range]
            except ValueError as error:
                raise web.HTTPRequestRangeNotSatisfiable from error
            response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
            response.content_length = len(part)
            await response.prepare(request)
            # Not sendfile: from a file in memory it passes single pages.
            for start in range(0, len(part), _SEND_BYTES):
                await response.write(part[start : start + _SEND_BYTES])
            await response.write_eof()
            return response

    async def _get_hashes(self, request: web.Request) -> web.Response:
        with self._find(request.match_info["name"]) as file:
            return web.Response(body=bytes(_check(file).hashes), content_type="application/octet-stream")


def _check(file: ServedFile | None) -> ServedFile:
    if file is None:
        raise web.HTTPNotFound(text="version not found, or no longer kept; get the current one from the head")
    return file
