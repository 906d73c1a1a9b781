"""The stacks of this process and of those that it has started, when they hang, and how the latter end.

A process that was started writes its stacks when it gets SIGUSR2 (`register_stacks`). Invariant: no process is
signalled that would end by it, and after `end_children` none is left, not even one that was stopped.
"""

import contextlib
import faulthandler
import logging
import signal
import tempfile
import time
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

STACKS_SIGNAL = signal.SIGUSR2
_WRITE_SECONDS = 2.0
_SILENT = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP, psutil.STATUS_ZOMBIE)


def register_stacks() -> None:
    """Let this process, and those that it forks, write their stacks to standard error when they get the signal."""
    faulthandler.register(STACKS_SIGNAL)


def read_stacks() -> str:
    """Return the Python stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")


def log_stacks() -> list[str]:
    """Let all processes that this one has started write their stacks, write its own, and wait a moment. Return why some
    give none."""
    silent = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            state = process.status()
            if state in _SILENT:
                silent.append(f"process {process.pid} ({process.name()}) is {state}: it gives no stacks")
            elif catches(process.pid, STACKS_SIGNAL):
                process.send_signal(STACKS_SIGNAL)
    faulthandler.dump_traceback()
    time.sleep(_WRITE_SECONDS)
    for each in silent:
        logger.error("%s", each)
    return silent


def end_children() -> None:
    """Kill all processes that this one has started."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal."""
    return bool(int(_read_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def describe_process(pid: int, begins: bytes) -> str:
    """Return the state of a process as the kernel says it; empty if this Pod has no such process. `begins`: how its
    command line does."""
    try:
        is_meant = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(begins)
    except OSError:
        return ""
    return _read_status(pid, "State") if is_meant else ""


def _read_status(pid: int, field: str) -> str:
    """Return what the kernel reports of a process; empty if there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")
