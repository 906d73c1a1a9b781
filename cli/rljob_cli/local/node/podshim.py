"""Runs one container's command, and leaves no process behind.

    python -I -S podshim.py PARENT_PID COMMAND...

As child subreaper it inherits every orphan, so that a grandchild in a new session cannot escape. It forwards SIGTERM;
SIGUSR1, or the death of the parent, kills the whole tree. Uses only the standard library, to start fast.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_RESCAN_SECONDS = 0.005
_EXIT_CANNOT_START = 127
SIGNAL_KILL_ALL = signal.SIGUSR1
_HANDLED = {signal.SIGTERM, SIGNAL_KILL_ALL, signal.SIGCHLD}


def set_child_subreaper() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_parent_death_signal(number: int) -> None:
    """Get this signal when the parent dies. Survives exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def scan_processes() -> tuple[dict[int, list[int]], set[int]]:
    """Return all processes of the machine by parent, and the dead ones, which may still be parents of living ones:
    a process is a zombie from the end of its first thread to the end of its last one."""
    tree: dict[int, list[int]] = {}
    dead: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry}/stat") as file:
            # The command's name is in parentheses, and may contain spaces and parentheses.
            state, parent = file.read().rpartition(")")[2].split()[:2]
            tree.setdefault(int(parent), []).append(int(entry))
            if state in "ZX":
                dead.add(int(entry))
    return tree, dead


def descendants(roots: Iterable[int]) -> list[int]:
    tree, dead = scan_processes()
    found: list[int] = []
    todo = list(roots)
    while todo:
        children = tree.get(todo.pop(), [])
        found += children
        todo += children
    return [pid for pid in found if pid not in dead]


def kill_descendants(root: int) -> None:
    """Send SIGKILL to all descendants until a scan finds none: a tree may fork while it dies."""
    while alive := descendants([root]):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(_RESCAN_SECONDS)
    _reap()


def _reap() -> dict[int, int]:
    """Reap dead children; return exit codes by pid, 128 + N for signal N."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            codes[pid] = code if code >= 0 else 128 - code
    return codes


def _start(command: list[str]) -> int:
    shim = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != shim:
            os._exit(_EXIT_CANNOT_START)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"rljob: cannot start {command[0]}: {error}\n".encode())
    os._exit(_EXIT_CANNOT_START)


def main(parent: int, command: list[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    set_child_subreaper()
    set_parent_death_signal(SIGNAL_KILL_ALL)
    if os.getppid() != parent:  # it died before set_parent_death_signal
        return _EXIT_CANNOT_START
    child = _start(command)
    while True:
        received = signal.sigwait(_HANDLED)
        if received == signal.SIGTERM:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        elif received == SIGNAL_KILL_ALL:
            os.kill(child, signal.SIGKILL)
        codes = _reap()
        if child in codes:
            kill_descendants(os.getpid())
            return codes[child]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
