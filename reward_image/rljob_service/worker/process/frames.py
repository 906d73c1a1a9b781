"""Length-prefixed frames: the protocol between server and worker over their socket pair.

Both sides import this, so it uses only the standard library. A frame is a 4-byte big-endian length and that many
bytes of JSON. A length over the protocol's limit means that the stream is broken. A frame over the reader's limit is
skipped as it arrives, and never held in memory.
"""

from __future__ import annotations

import socket
import struct

_HEADER = struct.Struct(">I")
_READ_BYTES = 1 << 18
MAX_FRAME_BYTES = 64 << 20
RETIRING = b"retire:"
"""Begins a frame, before the answer, with which a worker asks to be replaced after it. The reason follows."""


class BrokenFrameError(Exception):
    """The other side wrote something that is not a frame."""


def encode(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


class FrameBuffer:
    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        """Maximum size of the next frames. Longer ones are returned as None."""
        self._bytes = bytearray()
        self._num_skipped_bytes = 0
        """What is still to come of a frame that is skipped."""

    def feed(self, data: bytes) -> list[bytes | None]:
        if not self._bytes and not self._num_skipped_bytes and len(data) > _HEADER.size:
            (length,) = _HEADER.unpack_from(data)
            if length == len(data) - _HEADER.size and length <= self.max_bytes:
                return [data[_HEADER.size :]]  # usually one whole frame arrives
        frames: list[bytes | None] = []
        self._bytes += data
        start = 0
        while True:
            if self._num_skipped_bytes:
                num_bytes = min(self._num_skipped_bytes, len(self._bytes) - start)
                start += num_bytes
                self._num_skipped_bytes -= num_bytes
                if self._num_skipped_bytes:
                    break
                frames.append(None)
            if len(self._bytes) - start < _HEADER.size:
                break
            (length,) = _HEADER.unpack_from(self._bytes, start)
            if length > MAX_FRAME_BYTES:
                raise BrokenFrameError(f"a frame of {length} bytes was announced; the limit is {MAX_FRAME_BYTES}")
            body = start + _HEADER.size
            if length > self.max_bytes:
                self._num_skipped_bytes = length
                start = body
                continue
            if len(self._bytes) < body + length:
                break
            frames.append(bytes(self._bytes[body : body + length]))
            start = body + length
        del self._bytes[:start]
        return frames


class BlockingChannel:
    """The worker's side: one frame at a time over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = FrameBuffer()
        self._frames: list[bytes | None] = []

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
