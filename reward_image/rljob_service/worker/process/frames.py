"""Length-prefixed frames: the protocol between server and worker over their socket pair.

Both sides import this, so it uses only the standard library. A frame is a 4-byte big-endian length, the 4-byte number
of the request that it belongs to, and that many bytes of JSON. A length over the protocol's limit means that the stream
is broken. A frame over the reader's limit is skipped as it arrives, and never held in memory.
"""

import socket
import struct
from typing import NamedTuple

_HEADER = struct.Struct(">II")
_READ_BYTES = 1 << 18
MAX_FRAME_BYTES = 64 << 20
RETIRING = b"retire:"
"""Begins a frame, before the answer, with which a worker asks to be replaced after it. The reason follows."""
CANCEL = b""
"""From the server: the request with this number must end."""
_TRACED = b"00-"
"""Begins the payload of a request that belongs to a trace: its traceparent and a newline come before the JSON, which is
an object and cannot begin so."""
_ANSWER, _MAX_DIGITS = b"[", 12
"""An answer is a list. Before it come the microseconds of one that only computed, and a newline."""
NO_REQUEST = 0
"""Number of the first frame of each side. Those of requests begin at 1."""


class BrokenFrameError(Exception):
    """The other side wrote something that is not a frame."""


class Frame(NamedTuple):
    number: int
    """Number of the request."""
    payload: bytes | None
    """None: it was longer than the reader's limit."""


def encode(payload: bytes, number: int = NO_REQUEST) -> bytes:
    return _HEADER.pack(len(payload), number) + payload


def add_traceparent(body: bytes, traceparent: str) -> bytes:
    """Return the payload of a request. `traceparent`: of the span that it belongs to; empty for none."""
    return traceparent.encode() + b"\n" + body if traceparent else body


def split_traceparent(payload: bytes) -> tuple[str, bytes]:
    """Return the traceparent, or an empty text, and the body."""
    if not payload.startswith(_TRACED):
        return "", payload
    traceparent, _, body = payload.partition(b"\n")
    return traceparent.decode(), body


def add_computed(answer: bytes, microseconds: int | None) -> bytes:
    """Return the payload of an answer. `microseconds`: the CPU time of a request that did nothing but compute; None for
    others."""
    return answer if microseconds is None else b"%d\n%b" % (microseconds, answer)


def split_computed(payload: bytes) -> tuple[float | None, bytes]:
    """Return the seconds for which a request did nothing but compute, or None, and the answer."""
    if payload.startswith(_ANSWER):
        return None, payload
    digits, _, answer = payload.partition(b"\n")
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise BrokenFrameError("an answer that does not begin with a list, or with microseconds")
    return int(digits) / 1e6, answer


class FrameBuffer:
    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        """Maximum size of the next frames. Longer ones are returned without their payload."""
        self._bytes = bytearray()
        self._num_skipped_bytes = 0
        """What is still to come of a frame that is skipped."""
        self._skipped_number = NO_REQUEST

    def feed(self, data: bytes) -> list[Frame]:
        if not self._bytes and not self._num_skipped_bytes and len(data) > _HEADER.size:
            length, number = _HEADER.unpack_from(data)
            if length == len(data) - _HEADER.size and length <= self.max_bytes:
                return [Frame(number, data[_HEADER.size :])]  # usually one whole frame arrives
        frames: list[Frame] = []
        self._bytes += data
        start = 0
        while True:
            if self._num_skipped_bytes:
                num_bytes = min(self._num_skipped_bytes, len(self._bytes) - start)
                start += num_bytes
                self._num_skipped_bytes -= num_bytes
                if self._num_skipped_bytes:
                    break
                frames.append(Frame(self._skipped_number, None))
            if len(self._bytes) - start < _HEADER.size:
                break
            length, number = _HEADER.unpack_from(self._bytes, start)
            if length > MAX_FRAME_BYTES:
                raise BrokenFrameError(f"a frame of {length} bytes was announced; the limit is {MAX_FRAME_BYTES}")
            body = start + _HEADER.size
            if length > self.max_bytes:
                self._num_skipped_bytes, self._skipped_number = length, number
                start = body
                continue
            if len(self._bytes) < body + length:
                break
            frames.append(Frame(number, bytes(self._bytes[body : body + length])))
            start = body + length
        del self._bytes[:start]
        return frames


class BlockingChannel:
    """The worker's side: one frame at a time over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = FrameBuffer()
        self._frames: list[Frame] = []

    def read(self) -> Frame | None:
        """Return the next frame; None once the other side has closed."""
        while not self._frames:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                return None
            self._frames = self._buffer.feed(data)
        return self._frames.pop(0)

    def write(self, payload: bytes, number: int = NO_REQUEST) -> None:
        self._sock.sendall(encode(payload, number))
