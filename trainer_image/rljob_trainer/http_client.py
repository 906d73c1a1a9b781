"""The driver's HTTP client session, and how its requests are authorised."""

from __future__ import annotations

import os
import socket
from typing import Any

import aiohttp

from rljob_api.contract import ENV_TOKEN

# A node that vanishes sends no reset: without keep-alive probes a request to it would wait for its whole time-out.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


def open_session() -> aiohttp.ClientSession:
    """A session without a limit on connections: `fleet` limits requests a replica, and waiters hold none."""
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_keepalive_socket, keepalive_timeout=60)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10))


def job_headers() -> dict[str, str]:
    """For requests to the job's own parts, and to nobody else's."""
    return {"Authorization": f"Bearer {os.environ.get(ENV_TOKEN, '')}"}


def _keepalive_socket(info: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family=info[0], type=info[1], proto=info[2])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock
