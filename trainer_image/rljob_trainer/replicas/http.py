"""The driver's HTTP client session, and how its requests are authorised."""

from __future__ import annotations

import os
import socket
from typing import Any

import aiohttp

from rljob_api.wire.contract import ENV_TOKEN

# A node that vanishes sends no reset: without keep-alive probes a request to it would wait for its whole time-out.
# The kernel answers the probes, so a server that is merely busy passes them.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 15_000}

CONNECT_SECONDS = 4.0
"""Time for two more SYNs after a lost one. A Pod that has vanished answers none, and every request to it waits so long;
one that is merely busy connects at once, since its kernel accepts."""

IDLE_SECONDS = 20.0
"""How long an idle connection is kept for the next request. Of a burst's thousands none is left soon after it, and our
servers keep them for longer, so that no request meets a closed one."""


def open_session() -> aiohttp.ClientSession:
    """A session without a limit on connections of its own: `fleet` limits the requests that a replica has at once, each
    is one connection, and those who wait for a replica hold none."""
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_keepalive_socket, keepalive_timeout=IDLE_SECONDS)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    )


def auth_headers(variable: str = ENV_TOKEN) -> dict[str, str]:
    """For requests to the job's own parts, and to nobody else's; for others of ours with the token that `variable`
    holds."""
    return {"Authorization": f"Bearer {os.environ.get(variable, '')}"}


def _keepalive_socket(info: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family=info[0], type=info[1], proto=info[2])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock
