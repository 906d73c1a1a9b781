"""The stacks of vLLM's processes for the log, and their end, when the engine hangs.

A process writes its stacks when it gets SIGUSR2 (plugin.register). Invariant: no process is signalled that would end by
it, and after `end_engine` none is left, not even one that was stopped.
"""

import contextlib
import faulthandler
import logging
import signal
import time
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

STACKS_SIGNAL = signal.SIGUSR2
_WRITE_SECONDS = 2.0
_SILENT = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP, psutil.STATUS_ZOMBIE)


def register_stacks() -> None:
    """Let this process, and those that it forks, write their stacks to standard error when they get the signal."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def log_engine_stacks() -> list[str]:
    """Let all processes of this server write their stacks, and wait a moment. Return why some give none."""
    silent = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            state = process.status()
            if state in _SILENT:
                silent.append(f"process {process.pid} ({process.name()}) is {state}: it gives no stacks")
            elif catches(process.pid, STACKS_SIGNAL):
                process.send_signal(STACKS_SIGNAL)
    faulthandler.dump_traceback(all_threads=True)
    time.sleep(_WRITE_SECONDS)
    for each in silent:
        logger.error("%s", each)
    return silent


def end_engine() -> None:
    """Kill all processes of this server but itself."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(mask >> (number - 1) & 1)
