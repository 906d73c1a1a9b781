"""Loopback addresses that no other test, of this process or another one, uses."""

from __future__ import annotations

import itertools
import os

_NETWORK = f"127.{100 + os.getpid() // 250 % 100}.{1 + os.getpid() % 250}"
_hosts = itertools.cycle(range(1, 251))


def next_address() -> str:
    return f"{_NETWORK}.{next(_hosts)}"
