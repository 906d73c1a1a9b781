"""The driver's HTTP client session and its authorization header."""

import os
import socket
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from rljob_api.tracing.http_client import trace_configs
from rljob_api.wire.contract import ENV_TOKEN

# A node that vanishes sends no reset: without keep-alive probes, a request to it would last for its whole timeout.
# The kernel answers the probes, so a busy server passes them.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 15_000}

CONNECT_SECONDS = 4.0
"""Long enough for two more SYNs after a lost one. Every request to a Pod that vanished waits this long. A busy Pod
connects at once, since its kernel accepts."""

IDLE_SECONDS = 20.0
"""How long to keep an idle connection for the next request. RLJob's servers keep theirs longer, so that no request
meets a closed one."""


def open_session() -> aiohttp.ClientSession:
    """Return a session without a connection limit: a fleet already limits the requests per replica. Its requests have
    the current span's `traceparent`."""
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_keepalive_socket, keepalive_timeout=IDLE_SECONDS)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        trace_configs=trace_configs(),
    )


def auth_headers(variable: str = ENV_TOKEN) -> dict[str, str]:
    """Return the header with the token in environment variable `variable`. Send it to RLJob's own servers only."""
    return {"Authorization": f"Bearer {os.environ.get(variable, '')}"}


def _keepalive_socket(info: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family=info[0], type=info[1], proto=info[2])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def send(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    seconds: float,
    headers: Mapping[str, str] | None = None,
    **others: Any,
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Send a request that may take `seconds`. A redirect is an answer, and not followed: it would get the token.
    `headers`: None: those with the job's token."""
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
    headers = auth_headers() if headers is None else headers
    return session.request(method, url, headers=headers, timeout=timeout, allow_redirects=False, **others)
