"""The Ray head of the job, as a child process of the driver's.

Owns its start, its end, and that it never outlives us. Leaves everything inside Ray to the trainer group. Invariant:
when it dies, the driver does too: trainers and head begin again together.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

from rljob_api.errors import TransientError, UserError
from rljob_api.wire.contract import ENV_RAY_PORT, ENV_TOKEN, PORT_RAY
from rljob_trainer.ranks.process_tree import Raylet

log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100_000_000
"""Samples of a step pass through it, weights do not. Ray's own default would be 30% of the memory."""
_START_SECONDS = 60.0
_STOP_SECONDS = 3.0
"""Nothing is at stake any more: checkpoints are written by the ranks, and they have ended."""
_PORT_SECONDS = 20.0
"""How long a predecessor's sockets may hold the port."""
_WATCH_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def ray_environment() -> dict[str, str]:
    """Every process of the job that talks to Ray needs these before it imports it."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get(ENV_TOKEN, ""),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # A node gives up on its own helper processes after this; on a busy machine the default of 30 s is not enough.
        "RAY_agent_register_timeout_ms": "120000",
    }


def ray_port() -> int:
    """Port of the job's Ray head."""
    return int(os.environ.get(ENV_RAY_PORT) or PORT_RAY)


class RayHead:
    """`ray start --head`, supervised."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._process: asyncio.subprocess.Process | None = None
        # A short path: Ray puts sockets below it, whose names are limited to 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="rljob-ray-"))

    async def start(self) -> None:
        """Start it, and return when it accepts connections."""
        await self._wait_for_port()
        command = build_command(self._address, self._folder)
        environment = {**os.environ, **ray_environment()}
        self._process = await asyncio.create_subprocess_exec(
            *command, env=environment, preexec_fn=_die_with_parent, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await _accepts(self._address):
                    if self._process.returncode is not None:
                        raise TransientError(
                            f"the Ray head ended with {self._process.returncode} while starting; see the log"
                        )
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise TransientError(
                f"the Ray head does not listen on {self._address}:{ray_port()} after {_START_SECONDS:.0f} s"
            ) from error

    async def watch(self) -> None:
        """Raise when it ends, or can start nothing any more."""
        assert self._process is not None
        raylet = Raylet(self._process.pid)
        while not raylet.has_died():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_SECONDS):
                    code = await self._process.wait()
                raise TransientError(f"the Ray head ended with {code}")
        raise TransientError("the Ray head lost its raylet")

    async def close(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()  # `ray start --block` ends its own children
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_for_port(self) -> None:
        """A predecessor that was killed may hold it for a moment; anything else is said."""
        deadline = asyncio.get_running_loop().time() + _PORT_SECONDS
        while _is_taken(self._address):
            if asyncio.get_running_loop().time() > deadline:
                raise UserError(f"{self._address}:{ray_port()}: Ray's port cannot be had: stop what holds it")
            await asyncio.sleep(0.2)


def build_command(address: str, folder: Path) -> list[str]:
    """The command line of the head. It offers no resources: ranks run on the trainers' nodes alone."""
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        f"--node-ip-address={address}", f"--port={ray_port()}",
        "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false", "--disable-usage-stats",
        f"--object-store-memory={_OBJECT_STORE_BYTES}", f"--temp-dir={folder}",
    ]  # fmt: skip


def _die_with_parent() -> None:
    """In the child: SIGTERM when the driver dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_taken(address: str) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, ray_port()))
        except OSError:
            return True
    return False


async def _accepts(address: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(address, ray_port())
    except OSError:
        return False
    writer.close()
    return True
