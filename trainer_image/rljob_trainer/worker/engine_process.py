"""The processes of one engine: a session of its own, which ends as a whole.

Invariant: after `kill`, no process of the session is left, not even a zombie. The program must be a subreaper.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from rljob_api.errors import UserError
from rljob_api.manifest.pod_engines import PodEngine
from rljob_api.wire.contract import ENV_ENGINE, ENV_ENGINE_MODEL, ENV_TERMINATION_LOG
from rljob_api.wire.termination import ERROR_PREFIX

ROLLOUT = (sys.executable, "-m", "rljob_trainer.rollout")
SERVED_MODEL = (sys.executable, "-m", "rljob_trainer.rollout.served")
ENV_DEVICES = "CUDA_VISIBLE_DEVICES"


def engine_environment(values: Mapping[str, str], engine: PodEngine, num_pod_gpus: int, log: Path) -> dict[str, str]:
    """Return the variables of an engine of a Pod with `num_pod_gpus`. `log`: where it writes why it ends."""
    environment = {**values, ENV_ENGINE: str(engine.number), ENV_TERMINATION_LOG: str(log)}
    if engine.model:
        environment[ENV_ENGINE_MODEL] = engine.model
    if engine.gpus:
        given = values.get(ENV_DEVICES)
        names = [name.strip() for name in given.split(",")] if given else [str(index) for index in range(num_pod_gpus)]
        if len(names) < num_pod_gpus:
            raise UserError(
                f"spec.trainer.gpusPerReplica is {num_pod_gpus}, but {ENV_DEVICES} has {len(names)} GPUs: {given}; "
                "remove the variable from spec.trainer.env"
            )
        environment[ENV_DEVICES] = ",".join(names[index] for index in engine.gpus)
    return environment


class EngineProcess:
    """Runs from construction until it ends or is killed. Its output goes to this program's, with a prefix."""

    def __init__(self, number: int, environment: Mapping[str, str], command: Sequence[str]) -> None:
        self._message = Path(environment[ENV_TERMINATION_LOG])
        self._message.unlink(missing_ok=True)
        process = subprocess.Popen(
            command,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.session = process.pid
        self._is_gone, self._lock = False, threading.Lock()
        process.returncode = 0  # `poll` and `kill` wait for it
        arguments = (process.stdout, f"engine {number}: ".encode())
        threading.Thread(target=_copy_lines, args=arguments, name=f"engine-{number}", daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while the engine runs. Not after `kill`.

        It stays a zombie until then, so that its session's number belongs to no other process."""
        ended = os.waitid(os.P_PID, self.session, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def message(self) -> str:
        """Return why it ended, as it wrote it; empty if it did not."""
        with contextlib.suppress(OSError):
            return self._message.read_text(errors="replace").removeprefix(ERROR_PREFIX)
        return ""

    def terminate(self) -> None:
        """Ask it to end."""
        os.kill(self.session, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole session, and return once it is gone. May be repeated, also by another thread."""
        with self._lock:
            if self._is_gone:
                return
            os.killpg(self.session, signal.SIGKILL)
            # Who loses its parent becomes a child of this program before the parent can be reaped.
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-self.session, 0)
            self._is_gone = True


def _copy_lines(output: BinaryIO, prefix: bytes) -> None:
    with output:
        for line in output:
            # One write: lines of several engines do not mix.
            sys.stderr.buffer.write(prefix + line)
            sys.stderr.buffer.flush()
