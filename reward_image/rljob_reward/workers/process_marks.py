"""Which processes belong to which worker, however they have left its group and session and whoever adopted them.

A worker's mark is a resource limit that no kernel reads, that every descendant inherits and that none can change
(sandbox). Owns the reading of it and the ending of all that carry it. Leaves to others when that is done.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator

_LINE = b"Max file locks"
_MAX_SWEEPS = 50

MARKS = iter(range(secrets.randbits(46) << 16, 1 << 63))
"""Never the same on this machine again, for another server neither."""


def mark_of(pid: int) -> int | None:
    """The mark of a process or thread; None when it has none, or is gone."""
    try:
        with open(f"/proc/{pid}/limits", "rb", buffering=0) as file:
            text = file.read(4096)
    except OSError:
        return None
    start = text.find(_LINE)
    value = text[start + len(_LINE) :].split(None, 1)[0] if start >= 0 else b""
    return int(value) if value.isdigit() else None


def find(mark: int) -> Iterator[int]:
    """Processes that carry it, the dead that nobody has waited for left out: they hold nothing but a number."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and mark_of(int(entry)) == mark and _fields(int(entry))[:1] not in ([b"Z"], [b"X"]):
            yield int(entry)


def count(mark: int) -> int:
    """Threads of all processes that carry it."""
    # Fields after the name, which is in parentheses and may hold anything: state is the first, num_threads the 18th.
    return sum(int(fields[17]) for pid in find(mark) if len(fields := _fields(pid)) > 17)


def group_of(pid: int) -> int | None:
    """The process group of a process."""
    fields = _fields(pid)
    return int(fields[2]) if len(fields) > 2 else None


def end(mark: int) -> None:
    """Kill every process that carries it. Without a gate some may start meanwhile, so look until none is left."""
    for _ in range(_MAX_SWEEPS):
        found = list(find(mark))
        for pid in found:
            _kill(pid, mark)
        if not found:
            return


def _kill(pid: int, mark: int) -> None:
    """Kill by a descriptor, so that the number cannot have become another process's between look and kill."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(pid)
        try:
            if mark_of(pid) == mark:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _fields(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return []
