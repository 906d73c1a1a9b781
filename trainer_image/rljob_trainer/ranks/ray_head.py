"""The job's Ray head, a child process of the driver that never outlives it.

Invariant: when it dies, so does the driver: trainers and head start over together.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
from functools import partial

from rljob_api.errors import TransientError, UserError
from rljob_api.wire.contract import PORT_RAY
from rljob_api.wire.discovery import listening_port
from rljob_inputs.memory.limits import OBJECT_STORE_BYTES
from rljob_trainer.ranks import ray_node
from rljob_trainer.temporary import TemporaryFolder

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_STOP_SECONDS = 3.0
"""Nothing can be lost: the ranks write the checkpoints, and have ended."""
_PORT_SECONDS = 20.0
"""How long the sockets of a previous Ray head may occupy the port."""
_WATCH_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class RayHead:
    def __init__(self, address: str, store_bytes: int = OBJECT_STORE_BYTES) -> None:
        """`store_bytes`: size of the object store."""
        self._address, self._store_bytes = address, store_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._folder = TemporaryFolder("ray")

    async def start(self) -> None:
        await self._wait_for_port()
        command = build_command(self._address, self._folder.name, self._store_bytes)
        environment = {**os.environ, **ray_node.ray_environment()}
        die_with_parent = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)
        self._process = await asyncio.create_subprocess_exec(
            *command, env=environment, preexec_fn=die_with_parent, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await asyncio.to_thread(ray_node.is_listening, self._address):
                    if self._process.returncode is not None:
                        raise TransientError(
                            f"the Ray head exited with {self._process.returncode} while starting; see the log"
                        )
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise TransientError(
                f"the Ray head does not listen on {self._address}:{listening_port(PORT_RAY)} "
                f"after {_START_SECONDS:.0f} s"
            ) from error

    async def watch(self) -> None:
        """Raise TransientError when it exits, or loses its raylet and can no longer start actors."""
        assert self._process is not None
        raylet = ray_node.Raylet(self._process.pid)
        while not raylet.has_died():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_SECONDS):
                    code = await self._process.wait()
                raise TransientError(f"the Ray head exited with {code}")
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
        self._folder.cleanup()

    async def _wait_for_port(self) -> None:
        """Wait for the sockets of a killed predecessor. Raise UserError if the port stays occupied."""
        try:
            async with asyncio.timeout(_PORT_SECONDS):
                while _is_taken(self._address):  # noqa: ASYNC110 - a port has no event
                    await asyncio.sleep(0.2)
        except TimeoutError as error:
            raise UserError(
                f"cannot listen on {self._address}:{listening_port(PORT_RAY)} (Ray): the port is in use; "
                "stop the process that holds it"
            ) from error


def build_command(address: str, folder: str, store_bytes: int) -> list[str]:
    """Return the command line of the head's node.

    No resources: ranks run on the trainers' nodes only. No process that no rank needs: neither the dashboard's pages,
    nor the monitor of an autoscaler, whose metrics would be on all addresses without a token; and none that sends the
    logs of ranks to the driver, which those of the trainers' nodes do.
    """
    arguments = [
        "--head", f"--port={listening_port(PORT_RAY)}", "--num-gpus=0", "--include-dashboard=false", "--no-monitor",
        "--include-log-monitor=false",
    ]  # fmt: skip
    return ray_node.build_start_command(arguments, address, folder, store_bytes)


def _is_taken(address: str) -> bool:
    try:
        socket.create_server((address, listening_port(PORT_RAY))).close()
    except OSError:
        return True
    return False
