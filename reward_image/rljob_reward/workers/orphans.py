"""Processes that user code started and left behind: their parent has ended, and they become children of the server.

In a container the server is process 1, which must reap them, or each stays in the table for ever; elsewhere it asks the
kernel for the same role, so that `rljob run` leaves nothing behind either. Leaves the workers to `process`. Invariant:
no exit status of a worker is ever taken here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_REAP_SECONDS = 1.0
_END_SECONDS = 2.0
_POLL_SECONDS = 0.02


class Orphans:
    """Adopts orphans from the start, reaps them as they end, and ends them with the server."""

    def __init__(self, is_worker: Callable[[int], bool]) -> None:
        self._is_worker = is_worker
        self._loop = asyncio.get_running_loop()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._timer = self._loop.call_later(_REAP_SECONDS, self._tick)

    def _tick(self) -> None:
        self._reap()
        self._timer = self._loop.call_later(_REAP_SECONDS, self._tick)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there is no child at all
            while True:
                # A look alone: whose status this is must be known before it is taken.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or self._is_worker(ended.si_pid):
                    return  # the worker's own watch is about to take it; the others' turn comes with the next tick
                os.waitpid(ended.si_pid, os.WNOHANG)

    async def end(self) -> None:
        """Kill and reap every child that is left. All workers must be gone."""
        self._timer.cancel()
        deadline = self._loop.time() + _END_SECONDS  # a process in an uninterruptible wait dies when it can
        while (children := _children_of(os.getpid())) and self._loop.time() < deadline:
            for child in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            await asyncio.sleep(_POLL_SECONDS)
            self._reap()


def _children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # The second field, the name, is in parentheses and may hold anything.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found
