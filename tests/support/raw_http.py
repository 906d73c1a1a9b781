"""Bytes that are nearly HTTP, sent to a real server: cases of request smuggling, and mutated requests."""

from __future__ import annotations

import contextlib
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.waiting import DEADLINE_SECONDS

INNER = b"GET /inner HTTP/1.1\r\nHost: x\r\n\r\n"
"""What a server must not take for a request: it is within another one, by one of two readings."""
_SIZE = len(INNER)
_CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (_SIZE, INNER)
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLING = {
    "length and chunks": b"Content-Length: 5\r\n" + _CHUNKED + b"0\r\n\r\n" + INNER,
    "chunks and length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + INNER,
    "two lengths": b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % _SIZE + INNER,
    "list of lengths": b"Content-Length: 0, %d\r\n\r\n" % _SIZE + INNER,
    "signed length": b"Content-Length: +0\r\n\r\n" + INNER,
    "negative length": b"Content-Length: -1\r\n\r\n" + INNER,
    "hexadecimal length": b"Content-Length: 0x0\r\n\r\n" + INNER,
    "length beyond 64 bits": b"Content-Length: 18446744073709551616\r\n\r\n" + INNER,
    "folded length": b"X: a\r\n Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % _SIZE + INNER,
    "folded coding": b"Transfer-Encoding:\r\n chunked\r\nContent-Length: %d\r\n\r\n" % len(_CHUNK) + _CHUNK,
    "space before a colon": b"Content-Length : %d\r\n\r\n" % _SIZE + INNER,
    "coding with a space before its colon": b"Transfer-Encoding : chunked\r\n\r\n" + _CHUNK,
    "bare LF": b"X: a\nContent-Length: 0\n\n" + INNER,
    "bare CR": b"X: a\rContent-Length: 0\r\n\r\n" + INNER,
    "NUL": b"X: a\0b\r\nContent-Length: 0\r\n\r\n" + INNER,
    "unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n" + _CHUNK,
    "chunked before another coding": b"Transfer-Encoding: chunked, identity\r\n\r\n" + _CHUNK,
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + _CHUNK,
    "size beyond 64 bits": _CHUNKED + b"10000000000000000\r\n" + INNER,
    "signed size": _CHUNKED + b"-1\r\n" + INNER,
    "hexadecimal size": _CHUNKED + b"0x1\r\na\r\n0\r\n\r\n" + INNER,
    "size that ends too early": _CHUNKED + b"1\r\n" + INNER,
    "extension with a bare LF": _CHUNKED + b"0;a\n\r\n" + INNER,
    "size with a bare LF": _CHUNKED + b"0\n\n" + INNER,
}
"""By name: headers after the first ones, and a body."""
_TOKENS = [
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\xff", b"%", b"..", b"{", b"[", b'"', b"\xf0\x9f"),
    *(
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT ",
        b"OPTIONS * ",
        b"GET ",
        b"\x16\x03\x01",
    ),
    *(b"\r\nExpect: 100-continue", b"\r\nUpgrade: h2c\r\nConnection: Upgrade", b"\r\nConnection: close"),
    *(b"\r\nContent-Encoding: gzip", b"\r\nTransfer-Encoding: chunked", b"\r\nContent-Length: 3", b"0\r\n\r\n"),
    *(b"1e999", b"-0", b"9" * 5000, b"[" * 3000, b"\\ud800", b"A" * 20000),
]


@dataclass(frozen=True)
class Peer:
    """A server that listens, and the headers that let a request in."""

    address: tuple[str, int]
    path: bytes
    headers: bytes
    pid: int

    def begin(self, method: bytes = b"POST") -> bytes:
        return b"%b %b HTTP/1.1\r\nHost: x\r\n%b" % (method, self.path, self.headers)

    def exchange(self, data: bytes, *, ends: bool = True) -> bytes:
        """Send bytes, and return all that comes back. `ends`: say that no more follow; else wait for a moment alone,
        unless the bytes ask the server to close."""
        received = b""
        closes = ends or b"Connection: close" in data
        connection = socket.create_connection(self.address, timeout=DEADLINE_SECONDS if closes else 0.5)
        with connection, contextlib.suppress(OSError):  # it may close while it gets more
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                received += part
        return received

    def count_bytes(self) -> int:
        """Return its memory."""
        return psutil.Process(self.pid).memory_info().rss


def read_statuses(received: bytes) -> list[int]:
    """Return the status of each response, without 100 Continue."""
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", received) if status != b"100"]


def find_smuggled(peer: Peer) -> dict[str, bytes]:
    """Return what came back in each case that was not refused, or in which two requests were answered."""
    with ThreadPoolExecutor(len(SMUGGLING)) as threads:  # a server may wait for more
        answers = threads.map(lambda case: peer.exchange(peer.begin() + case, ends=False), SMUGGLING.values())
        return {
            name: received
            for name, received in zip(SMUGGLING, answers, strict=True)
            if len(statuses := read_statuses(received)) > 1 or any(not 400 <= each < 500 for each in statuses)
        }


@st.composite
def nearly_http(draw: st.DrawFn, requests: list[bytes]) -> bytes:
    """Return a request, or two, with some pieces removed, repeated or put in between; or anything."""
    data = b"".join(draw(st.lists(st.sampled_from([*requests, INNER]), min_size=1, max_size=2)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        piece = draw(st.one_of(st.sampled_from(_TOKENS), st.binary(max_size=8), st.just(data[start:end] * 2)))
        data = data[:start] + piece + data[end:]
    return data


def check_nearly_http(peer: Peer, requests: list[bytes], *, max_examples: int, max_bytes: int) -> None:
    """Require that what is nearly one of the requests, or two, is refused or answered, and that memory stays."""
    before = peer.count_bytes()

    @settings(max_examples=max_examples, derandomize=True, database=None, deadline=None)
    @given(nearly_http(requests))
    def check(data: bytes) -> None:
        statuses = read_statuses(peer.exchange(data))
        assert len(statuses) <= data.count(b"HTTP/") + 1, "the last may be of what follows a request"
        assert all(status < 500 for status in statuses), statuses

    check()
    assert peer.count_bytes() - before < max_bytes
