"""HTTP/1.1 connections, from bytes to requests and back, with limits that apply before a client is authenticated.

httptools parses; this owns limits, timeouts, keep-alive and the notice that a client has left. Leaves paths, the token
and status codes to a Handler. One callback per request and no task: each costs as much as the parsing. Invariant: what
a client without the token makes the server keep is bounded, per connection and in the number of connections.

A request has no time limit once it has arrived: an episode takes an hour. Its client needs none for reading, and TCP
keep-alive probes, by which each side notices that the other's node has died.
"""

from __future__ import annotations

import asyncio
import http
import json
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from rljob_api.quantity import format_bytes

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 10
"""Limit of a request line and its headers, except for what one read adds."""
RECEIVE_SECONDS = 60
"""Time for a client to send one request, from the connection or its first byte."""
IDLE_SECONDS = 120
"""Longer than clients keep an idle connection: they close it first, so no request meets a closed connection."""
LEFT = 0
"""Instead of a status: the client has disconnected."""
_MAX_PIPELINED = 16
"""Requests that wait while one is answered. What follows them is not read, and the connection ends with the last."""
_TICK_SECONDS = 1.0
_BACKLOG = 8192
_JSON = b"application/json"
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in http.HTTPStatus}
_OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class Handler(Protocol):
    def admit(self, request: Request) -> int:
        """Return the maximum bytes of the request's body, or reject it. Only the head is known."""

    def handle(self, request: Request) -> None:
        """Answer a complete request, now or later, with request.respond()."""

    def record_response(self, status: int) -> None: ...


class Request:
    """One request. Answered at most once; on_left is called if the client disconnects before that."""

    __slots__ = (
        "_connection",
        "_on_end",
        "_on_left",
        "authorization",
        "body",
        "expects_continue",
        "framing",
        "keeps_alive",
        "method",
        "path",
        "traceparent",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        self.method = b""
        self.path = b""
        self.authorization = b""
        self.traceparent = b""
        self.body = b""
        self.framing = b""
        """The headers that say where its body ends."""
        self.keeps_alive = True
        self.expects_continue = False
        self._on_left: Callable[[], None] | None = None
        self._on_end: Callable[[int], None] | None = None

    def record_authenticated(self) -> None:
        """Called by admit(): the connection is no longer one of those that are closed first."""
        if self._connection is not None:
            self._connection.record_authenticated()

    def call_when_left(self, callback: Callable[[], None]) -> None:
        """Call it if the client disconnects before the response."""
        self._on_left = callback

    def call_at_end(self, callback: Callable[[int], None]) -> None:
        """Call it once with the status of the response, or with LEFT if the client disconnects before that."""
        self._on_end = callback

    def deliver(self, response: bytes) -> None:
        """Respond with a result."""
        self.respond(200, response)

    def is_disconnected(self) -> bool:
        return self._connection is None

    def respond(self, status: int, body: bytes, *headers: tuple[bytes, bytes], content_type: bytes = _JSON) -> None:
        """Send the response. No effect after the first one, or if the client has left."""
        connection, self._connection = self._connection, None
        self._on_left = None  # it may refer to this object
        if connection is None:
            return
        self._report_end(status)
        if connection.is_closing:
            self.keeps_alive = False
        if status == 200 and content_type is _JSON and self.keeps_alive:
            connection.end(self, status, _OK_HEAD % (len(body), body))
            return
        lines = [_STATUS_LINES[status], b"content-type: " + content_type, b"content-length: %d" % len(body)]
        lines += [b"%b: %b" % header for header in headers]
        if not self.keeps_alive:
            lines.append(b"connection: close")
        shown = b"" if self.method == b"HEAD" else body
        connection.end(self, status, b"\r\n".join(lines) + b"\r\n\r\n" + shown)

    def refuse(self, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
        self.respond(status, json.dumps({"detail": detail}).encode(), *headers)

    def reject(self, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
        """Refuse a request whose body has not arrived. It is not read, so the connection ends with the response."""
        self.keeps_alive = False
        self.refuse(status, detail, *headers)

    def leave(self) -> None:
        """The client has disconnected."""
        if self._connection is not None:
            self._connection = None
            self._report_end(LEFT)
            if self._on_left is not None:
                self._on_left()

    def _report_end(self, status: int) -> None:
        callback, self._on_end = self._on_end, None
        if callback is not None:
            callback(status)


class Connection(asyncio.Protocol):
    """Parses requests and answers them one at a time; pipelined ones wait for a later turn of the loop."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._handler = server.handler
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set before anything else is called
        self._request: Request | None = None
        """The one that is being received."""
        self._num_head_bytes = 0
        self._max_body_bytes = 0
        self._num_body_bytes = 0
        self._chunks: list[bytes] = []
        self._in_head = False
        self._answering: Request | None = None
        self._pipelined: deque[Request] = deque()
        self._has_answered = False
        """In this turn of the loop."""
        self._is_rejected = False
        self.is_authenticated = False

    @property
    def is_closing(self) -> bool:
        return self._server.is_closing

    @property
    def is_working(self) -> bool:
        """Whether an authenticated client waits for a response, or is sending a request."""
        return self._answering is not None or (self._request is not None and self.is_authenticated)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's share no base class with asyncio's
        self._server.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.remove(self)
        self._parser = None  # it refers to this object
        for request in (self._answering, *self._pipelined):
            if request is not None:
                request.leave()
        self._pipelined.clear()

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        self._has_answered = False
        try:
            while self._parser is not None and data:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._ignore_offer(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            logger.error("a request could not be handled", exc_info=error.__context__)
            self.abort()
        except httptools.HttpParserError as error:
            if self._parser is not None:  # else what it had refused is answered, and this is the rest of it
                self._reject_stream(400, f"not HTTP: {error}")
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._reject_stream(431, f"request line and headers must have at most {MAX_HEAD_BYTES} bytes")

    def _ignore_offer(self, body: bytes) -> bytes:
        """Begin a request anew that offers another protocol, which RFC 9110 permits to ignore. Return what is to be
        parsed: the parser took the body for that protocol."""
        request, self._request = self._request, None
        if request is None or request.method == b"CONNECT":  # what follows is not HTTP
            self._stop_parsing()
            return b""
        self._parser = httptools.HttpRequestParser(self)
        head = b"%b %b HTTP/1.1\r\nauthorization: %b\r\ntraceparent: %b\r\n%b\r\n"
        values = (request.method, request.path, request.authorization, request.traceparent, request.framing)
        return head % values + body

    def pause_writing(self) -> None:
        self._transport.pause_reading()  # a client that does not read its responses gets no more of them

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def abort(self) -> None:
        self._parser = None
        self._transport.abort()

    def record_authenticated(self) -> None:
        if not self.is_authenticated:
            self.is_authenticated = True
            self._server.record_authenticated(self)

    # The parser calls the methods up to on_message_complete, also for the rest of the data after _stop_parsing().

    def on_message_begin(self) -> None:
        if self._parser is not None:
            self._request = Request(self)
            self._in_head = True
            self._num_head_bytes = 0
            self._server.record_receiving(self)

    def on_url(self, url: bytes) -> None:
        if self._request is not None:
            self._request.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._request
        if request is None:
            return
        # Lengths first: most headers are others.
        if len(name) == 13 and name.lower() == b"authorization":
            request.authorization = value
        elif len(name) == 6 and name.lower() == b"expect":
            request.expects_continue = value.lower() == b"100-continue"
        elif len(name) == 11 and name.lower() == b"traceparent":
            request.traceparent = value
        elif len(name) in (14, 17) and name.lower() in (b"content-length", b"transfer-encoding"):
            request.framing += b"%b: %b\r\n" % (name, value)

    def on_headers_complete(self) -> None:
        request, parser = self._request, self._parser
        if request is None or parser is None:
            return
        self._in_head = False
        if parser.get_http_version() == "0.9":  # any line would be a request
            return self._reject_stream(400, "not HTTP: the request line has no version")
        self._num_body_bytes = 0
        request.method = parser.get_method()
        request.keeps_alive = parser.should_keep_alive()
        request.path = request.path.partition(b"?")[0]
        self._max_body_bytes = self._handler.admit(request)
        if request.expects_continue and not request.is_disconnected():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._request is None:
            return
        self._num_body_bytes += len(data)
        if self._num_body_bytes <= self._max_body_bytes:
            self._chunks.append(data)
        else:
            limit = format_bytes(self._max_body_bytes)
            self._request.reject(413, f"the request body must have at most {limit}; raise maxRequestSize")

    def on_message_complete(self) -> None:
        request, parser = self._request, self._parser
        if request is not None and parser is not None and parser.should_upgrade():
            return  # data_received begins it again
        self._request = None
        if request is None:
            if self._is_rejected:
                self._transport.close()
            return
        request.body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = []
        if self._answering is None and not self._has_answered:
            self._has_answered = True
            self._answer(request)
            return
        self._pipelined.append(request)
        self._transport.pause_reading()
        if self._answering is None and len(self._pipelined) == 1:
            asyncio.get_running_loop().call_soon(self._answer_next)
        if len(self._pipelined) == _MAX_PIPELINED:
            self._stop_parsing()

    def _answer(self, request: Request) -> None:
        self._server.record_working(self)
        self._answering = request
        self._handler.handle(request)

    def end(self, request: Request, status: int, response: bytes) -> None:
        """Send the response to `request`, and start with the next one."""
        self._handler.record_response(status)
        if request is not self._answering:
            # Rejected before its end. If the rest were not received, the client might not get the response.
            if self._answering is None and not self._pipelined:  # else it would be taken for theirs
                self._transport.write(response)
                self._is_rejected = True
            self._stop_parsing()
            return
        self._transport.write(response)
        self._answering = None
        self._server.record_idle(self)
        if not request.keeps_alive:
            self._transport.close()
        elif self._pipelined:  # later, or a long pipeline would recurse
            asyncio.get_running_loop().call_soon(self._answer_next)

    def _answer_next(self) -> None:
        if self._answering is None and self._pipelined:
            request = self._pipelined.popleft()
            if not self._pipelined:
                self._transport.resume_reading()
            self._answer(request)

    def _reject_stream(self, status: int, detail: str) -> None:
        """Reject what cannot be parsed further."""
        (self._request or Request(self)).reject(status, detail)

    def _stop_parsing(self) -> None:
        """Discard what the client still sends, until it closes the connection or its time is over."""
        self._parser = self._request = None
        self._in_head = False
        self._chunks = []
        last = self._pipelined[-1] if self._pipelined else self._answering
        if last is not None:
            last.keeps_alive = False


class HttpServer:
    """All connections of a listening socket, and the times after which they are closed."""

    def __init__(self, handler: Handler, max_connections: int) -> None:
        self.handler = handler
        self.is_closing = False
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tick = 0
        """Seconds during which this loop was not blocked: a client's data may wait in the kernel while it is."""
        self._connections: set[Connection] = set()
        # Each in the order of arrival in it, with the tick of that.
        self._unauthenticated: dict[Connection, None] = {}
        self._receiving: dict[Connection, int] = {}
        self._idle: dict[Connection, int] = {}
        self._empty = asyncio.Event()

    async def listen(self, listener: socket.socket) -> None:
        self._server = await self._loop.create_server(lambda: Connection(self), sock=listener, backlog=_BACKLOG)
        self._timer = self._loop.call_later(_TICK_SECONDS, self._on_tick)

    async def close(self, timeout_seconds: float) -> None:
        """Close all connections; first let authenticated clients get their responses, for at most that time."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            if not connection.is_working:
                connection.abort()
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._connections:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()
        if self._timer is not None:
            self._timer.cancel()

    def add(self, connection: Connection) -> None:
        if len(self._connections) >= self._max_connections:
            self._make_room()
        self._connections.add(connection)
        self._unauthenticated[connection] = None
        self._receiving[connection] = self._tick

    def remove(self, connection: Connection) -> None:
        self._connections.discard(connection)
        for group in (self._unauthenticated, self._receiving, self._idle):
            group.pop(connection, None)
        if not self._connections:
            self._empty.set()

    def record_authenticated(self, connection: Connection) -> None:
        self._unauthenticated.pop(connection, None)

    def record_receiving(self, connection: Connection) -> None:
        """A request has begun. The first one's time began with the connection."""
        if self._idle.pop(connection, None) is not None:
            self._receiving[connection] = self._tick

    def record_working(self, connection: Connection) -> None:
        self._receiving.pop(connection, None)
        self._idle.pop(connection, None)  # the request began while an earlier one was answered

    def record_idle(self, connection: Connection) -> None:
        self._idle[connection] = self._tick

    def _make_room(self) -> None:
        """Close the connection that is worth least: the oldest without the token, else the one idle for longest."""
        for group in (self._unauthenticated, self._idle):
            for connection in group:
                self.remove(connection)
                connection.abort()
                return

    def _on_tick(self) -> None:
        self._tick += 1
        for group, seconds in ((self._receiving, RECEIVE_SECONDS), (self._idle, IDLE_SECONDS)):
            expired = []
            for connection, since in group.items():
                if self._tick - since <= seconds:
                    break
                expired.append(connection)
            for connection in expired:
                group.pop(connection)
                connection.abort()
        self._timer = self._loop.call_later(_TICK_SECONDS, self._on_tick)
