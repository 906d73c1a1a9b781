"""Runs one container's command, and leaves nothing of it behind.

    python -I -S podshim.py PARENT_PID COMMAND...

Owns one container's process tree: as child subreaper it inherits every orphan, so that a grandchild in a session of
its own cannot get away. SIGTERM goes on to the command; SIGUSR1, or the death of the parent, kills the whole tree.
Invariant: when this process ends, no descendant is alive. The standard library alone, since every container pays.
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
    """Make the calling process the new parent of every orphan below it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_parent_death_signal(number: int) -> None:
    """Ask the kernel for a signal when the parent dies. Survives exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def scan_processes() -> tuple[dict[int, list[int]], set[int]]:
    """Every process of the machine by its parent, and those that are dead already.

    The dead belong to the tree: a process whose first thread has ended counts as a zombie and still is a parent, until
    its last thread has ended too.
    """
    tree: dict[int, list[int]] = {}
    dead: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry}/stat") as file:
            # The command's name, in parentheses, may hold spaces and parentheses itself.
            state, parent = file.read().rpartition(")")[2].split()[:2]
            tree.setdefault(int(parent), []).append(int(entry))
            if state in "ZX":
                dead.add(int(entry))
    return tree, dead


def descendants(roots: Iterable[int]) -> list[int]:
    """Everything alive below the roots, by the chain of parents. The roots are not part of it."""
    tree, dead = scan_processes()
    found: list[int] = []
    todo = list(roots)
    while todo:
        children = tree.get(todo.pop(), [])
        found += children
        todo += children
    return [pid for pid in found if pid not in dead]


def kill_descendants(root: int) -> None:
    """SIGKILL everything below `root`, again and again, until a scan finds nothing: a tree may fork as it dies."""
    while alive := descendants([root]):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(_RESCAN_SECONDS)
    _reap()


def _reap() -> dict[int, int]:
    """Collect every dead child: pid to exit code, 128 + N for signal N."""
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
    if os.getppid() != parent:  # It died before the kernel could be asked to tell us.
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
