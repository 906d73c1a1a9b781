"""What the Ray head and the trainers' Ray nodes share: environment, port, command line, and a check of the raylet."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Sequence

import psutil

from rljob_api.wire.contract import ENV_RAY_PORT, ENV_TOKEN, PORT_RAY

ENV_NUM_THREADS = "RLJOB_NUM_THREADS"
"""The user's OMP_NUM_THREADS, which the worker passes to its ranks: Ray sets that variable to 1."""
_CONNECT_SECONDS = 2.0


def ray_environment() -> dict[str, str]:
    """Return the variables that a process needs before it imports Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get(ENV_TOKEN, ""),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",  # the output is a log file, not a terminal
        # Time for a node's helper processes to start; on a busy machine the default of 30 s is too short.
        "RAY_agent_register_timeout_ms": "120000",
    }


def ray_port() -> int:
    return int(os.environ.get(ENV_RAY_PORT) or PORT_RAY)


def ray_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder for a node's files. Its path is short: paths of sockets are limited to 107 bytes."""
    return tempfile.TemporaryDirectory(prefix="rljob-ray-", ignore_cleanup_errors=True)


def build_start_command(arguments: Sequence[str], address: str, folder: str, store_bytes: int) -> list[str]:
    """Return `ray start --block` for a node on `address`, with its files in `folder` and an object store of
    `store_bytes`. It offers no CPUs: ranks are the only actors."""
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments,
        f"--node-ip-address={address}", "--num-cpus=0", "--disable-usage-stats",
        f"--object-store-memory={store_bytes}", f"--temp-dir={folder}",
    ]  # fmt: skip


def is_listening(address: str) -> bool:
    try:
        socket.create_connection((address, ray_port()), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


class Raylet:
    """The raylet below one `ray start --block`. That process keeps running when its raylet dies, for example because an
    agent was killed. The node then looks alive, but starts no actor."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._seen = False

    def has_died(self) -> bool:
        """Return True once the raylet existed and no longer does."""
        try:
            alive = any(map(_is_raylet, psutil.Process(self._node).children(recursive=True)))
        except psutil.NoSuchProcess:
            alive = False
        self._seen = self._seen or alive
        return self._seen and not alive


def _is_raylet(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE
    return False
