"""Find the processes of a worker, even those that left its process group and session or were adopted.

A worker's mark is a resource limit that the kernel ignores, that every descendant inherits and that none can change
(sandbox). Owns reading the mark and killing all processes that carry it.
"""

import contextlib
import secrets
from collections.abc import Container, Iterator

import psutil

_LIMIT_NAME = b"Max file locks"
_MAX_SWEEPS = 50

MARKS = iter(range(secrets.randbits(46) << 16, 1 << 63))
"""Unique on this machine, also among servers."""


def mark_of(pid: int) -> int | None:
    """Return the mark of a process or thread; None if it has none or no longer exists."""
    try:
        # Not psutil.Process.rlimit(): prlimit(2) on another user's process needs CAP_SYS_RESOURCE.
        with open(f"/proc/{pid}/limits", "rb", buffering=0) as file:
            text = file.read(4096)
    except OSError:
        return None
    start = text.find(_LIMIT_NAME)
    value = text[start + len(_LIMIT_NAME) :].split(None, 1)[0] if start >= 0 else b""
    return int(value) if value.isdigit() else None


def find_processes(mark: int) -> Iterator[psutil.Process]:
    """Yield the living processes that carry this mark. Zombies are excluded: they hold only a pid."""
    for pid in psutil.pids():
        if mark_of(pid) != mark:
            continue
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            # Checked again: now `process` knows its start time, so that a reused pid is not mistaken for it.
            if mark_of(pid) == mark and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                yield process


def count_threads(mark: int) -> int:
    total = 0
    for process in find_processes(mark):
        with contextlib.suppress(psutil.Error):
            total += process.num_threads()
    return total


def kill_processes(mark: int, kept: Container[psutil.Process] = ()) -> list[list[str]]:
    """Kill the processes that carry this mark, except `kept`, and return their command lines. Repeats, since they can
    still fork."""
    commands = []
    for _ in range(_MAX_SWEEPS):
        found = [process for process in find_processes(mark) if process not in kept]
        for process in found:
            with contextlib.suppress(psutil.Error):
                commands.append(process.cmdline())
                process.kill()  # not after the kernel has reused its pid: psutil compares the start time
        if not found:
            break
    return commands
