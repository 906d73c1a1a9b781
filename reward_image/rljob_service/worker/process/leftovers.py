"""What a request leaves behind in the worker's own process: timers, threads and files. Standard library only.

Timers are reset and files removed; what cannot be undone is a reason to replace the worker. Processes are ended by the
server (pool/process.py). Invariant: nothing that the import created is touched.
"""

import errno
import signal
import sys
from collections.abc import Iterator
from typing import Any

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_THREAD_GRACE_SECONDS = 0.02
_EXHAUSTED = frozenset((errno.ENOMEM, errno.EMFILE, errno.ENFILE))
_MAX_CAUSES = 100


class Leftovers:
    """Created after the import. `reset` undoes one request and returns why the worker must be replaced, or ''."""

    def __init__(self) -> None:
        self._kept = frozenset(_find_threads())

    def reset(self) -> str:
        _reset_timers()
        threading = sys.modules.get("threading")
        if threading is None or threading.active_count() == 1:
            return ""
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and thread not in self._kept:
                thread.cancel()
        left = [thread for thread in _find_threads() if thread not in self._kept]
        for thread in left:
            thread.join(_THREAD_GRACE_SECONDS / len(left))
        names = ", ".join(thread.name for thread in left if thread.is_alive())
        return f"a request left threads that still run: {names}" if names else ""


def _reset_timers() -> None:
    """Cancel pending alarms. A handler of the function may raise meanwhile."""
    pending = True
    while pending:
        try:
            for timer in _TIMERS:
                signal.setitimer(timer, 0)
            pending = False
        except BaseException:  # raised by a signal handler that the function installed
            continue


def _find_threads() -> Iterator[Any]:
    """Yield the threads that would keep a program from ending. Threads of executors wait for work, and may stay."""
    threading = sys.modules.get("threading")
    if threading is None:
        return
    executors = sys.modules.get("concurrent.futures.thread")
    pooled = getattr(executors, "_threads_queues", {})
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread() and thread not in pooled:
            yield thread


def describe_exhaustion(error: BaseException) -> str:
    """Return the resource of the process that is used up, by an error or its causes; empty if none is."""
    current: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if current is None:
            break
        if isinstance(current, MemoryError) or (isinstance(current, OSError) and current.errno in _EXHAUSTED):
            what = "memory" if isinstance(current, MemoryError) or current.errno == errno.ENOMEM else "open files"
            return f"it ran out of {what}"
        current = current.__cause__ or current.__context__
    return ""
