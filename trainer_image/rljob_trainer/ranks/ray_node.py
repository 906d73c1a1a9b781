"""What the Ray head and the trainers' Ray nodes share: environment, port, command line, and a check of the raylet."""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence

import psutil

from rljob_api.wire.contract import ENV_TOKEN, PORT_RAY
from rljob_api.wire.discovery import listening_port
from rljob_api.wire.logs import choose_format

ENV_NUM_THREADS = "RLJOB_NUM_THREADS"
"""The user's OMP_NUM_THREADS, which the worker passes to its ranks: Ray sets that variable to 1."""
PROCESS_NAME = b"ray::RankProcess"
"""How the command line of a rank begins."""
_CONNECT_SECONDS = 2.0


_START = "import sys; sys.modules['grpc'] = None; from ray.scripts.scripts import main; sys.exit(main())"
"""Starts what Ray's minimal installation (without the extra `default`) starts: no server for Ray's client, and agents
without a dashboard, metrics and jobs, which nobody reads. Ray asks whether these packages can be imported."""


def ray_environment() -> dict[str, str]:
    """Return the variables that a process needs before it imports Ray."""
    # Ray begins each line of a rank with its name, which would be no JSON.
    is_json = choose_format() == "json"
    return ({"RAY_DISABLE_WORKER_LOG_PREFIX": "1"} if is_json else {}) | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get(ENV_TOKEN, ""),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",  # the output is a log file, not a terminal
        # Time for a node's helper processes to start; on a busy machine the default of 30 s is too short.
        "RAY_agent_register_timeout_ms": "120000",
        # Of each log of a node and its ranks. Ray's own limit is 3 GB for those of a node, and none for those of ranks.
        "RAY_ROTATION_MAX_BYTES": str(16 << 20),
        "RAY_ROTATION_BACKUP_COUNT": "2",
    }


def build_start_command(arguments: Sequence[str], address: str, folder: str, store_bytes: int) -> list[str]:
    """Return `ray start --block` for a node on `address`, with its files in `folder` and an object store of
    `store_bytes`. It offers no CPUs: ranks are the only actors."""
    return [
        sys.executable, "-c", _START, "start", "--block", *arguments,
        f"--node-ip-address={address}", "--num-cpus=0", "--disable-usage-stats",
        f"--object-store-memory={store_bytes}", f"--temp-dir={folder}",
    ]  # fmt: skip


def is_listening(address: str, port: int | None = None) -> bool:
    """`port`: of the Ray head, by default."""
    try:
        connect(address, port)
    except OSError:
        return False
    return True


def connect(address: str, port: int | None = None) -> None:
    """Open a connection, and close it. OSError if there is none: ConnectionRefusedError if no process listens."""
    place = (address, listening_port(PORT_RAY) if port is None else port)
    socket.create_connection(place, timeout=_CONNECT_SECONDS).close()


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
