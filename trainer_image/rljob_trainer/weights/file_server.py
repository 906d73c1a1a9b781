"""Serves weight files over HTTP, whole, by ranges, as what changed, and with the hashes of their chunks.

Who has the version before names its hash (`BASE_HEADER`) with a range of whole chunks. If the file knows it, the answer
is 226 (IM Used, RFC 3229): of each chunk the length in 4 bytes, and a delta, or the chunk if that is shorter.

The publisher and the replicas serve the same two paths, so a receiver may use any source. The owner decides which file
is served, and when it may change. A receiver verifies every chunk, so a file that changes while it is sent costs one
attempt.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp import web

from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_api.wire.discovery import listening_port
from rljob_trainer.server_thread import ServerThread, require_token
from rljob_trainer.weights.checksum import CHUNK_BYTES
from rljob_trainer.weights.deltas import encode

FILE_PATH, HASHES_PATH = "/weights/{name}", "/weights/{name}/hashes"
_SEND_BYTES = 1 << 20
BASE_HEADER, LENGTH_BYTES = "Rljob-Base", 4


@dataclass
class ServedFile:
    data: memoryview
    """Its content, mapped."""
    hashes: bytes | bytearray
    """Hashes of all chunks (see `hash_chunk`); zeros for a chunk that the file does not have yet."""
    base: str = ""
    """Hash of the version of which it has deltas. Empty: of none."""
    base_data: memoryview | None = None
    """That version's content, to find what changed; None: `deltas` has all that are known."""
    deltas: dict[int, bytes] = field(default_factory=dict)
    """By index of the chunk. An empty one: the chunk itself is shorter."""

    def changes(self, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Yield the parts of an answer with what changed in these bytes."""
        for begin in range(start, stop, CHUNK_BYTES):
            index, place = begin // CHUNK_BYTES, slice(begin, min(begin + CHUNK_BYTES, stop))
            if index not in self.deltas and self.base_data is not None:
                delta = encode(self.base_data[place], chunk := self.data[place])
                self.deltas[index] = delta if len(delta) < len(chunk) else b""  # a receiver tells them apart by this
            content = self.deltas.get(index) or self.data[place]
            yield len(content).to_bytes(LENGTH_BYTES, "little")
            yield content


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
            file = _check(file)
            data = file.data
            try:
                asked = request.http_range
                parts: list[bytes | memoryview] = [data[asked]]
            except ValueError as error:
                raise web.HTTPRequestRangeNotSatisfiable from error
            status = HTTPStatus.PARTIAL_CONTENT if "Range" in request.headers else HTTPStatus.OK
            start, stop, _ = asked.indices(len(data))
            whole = start % CHUNK_BYTES == 0 and (stop % CHUNK_BYTES == 0 or stop == len(data))
            if file.base and request.headers.get(BASE_HEADER) == file.base and whole:
                parts, status = await asyncio.to_thread(list, file.changes(start, stop)), HTTPStatus.IM_USED
            response = web.StreamResponse(status=status)
            response.content_length = sum(map(len, parts))
            await response.prepare(request)
            # Not sendfile: from a file in memory it passes single pages.
            for part in parts:
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
