"""Length-prefixed frames: the protocol between server and worker over their socket pair.

Both sides import this, so it uses only the standard library. A frame is a 4-byte big-endian length and that many
bytes of JSON. A length over the limit means that the stream is broken, never that a message is long.
"""

from __future__ import annotations

import socket
import struct

_HEADER = struct.Struct(">I")
_READ_BYTES = 1 << 18
MAX_FRAME_BYTES = 64 << 20


class BrokenFrameError(Exception):
    """The other side wrote something that is not a frame."""


def encode(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


class FrameBuffer:
    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._bytes + data if self._bytes else data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise BrokenFrameError(f"a frame of {length} bytes was announced; the limit is {MAX_FRAME_BYTES}")
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            frames.append(buffer[start + _HEADER.size : end])
            start = end
        self._bytes = buffer[start:]
        return frames


class BlockingChannel:
    """The worker's side: one frame at a time over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = FrameBuffer()
        self._frames: list[bytes] = []

    def read(self) -> bytes | None:
        """Return the next frame; None once the other side has closed."""
        while not self._frames:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                return None
            self._frames = self._buffer.feed(data)
        return self._frames.pop(0)

    def write(self, payload: bytes) -> None:
        self._sock.sendall(encode(payload))
