"""Processes that user code started and left behind: their parent ends, and they become children of the server.

In a container the server is process 1, which must reap them, or each stays a zombie. Elsewhere it asks the kernel for
the same role (subreaper), so that `rljob run` leaves nothing behind either. WorkerProcess reaps the workers. Invariant:
no exit status of a worker is ever taken here.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable

import psutil

from rljob_service.worker.sandbox.system import libc_prctl

_PR_SET_CHILD_SUBREAPER = 36
_REAP_SECONDS = 1.0
_KILL_TIMEOUT_SECONDS = 2.0
_POLL_SECONDS = 0.02


class Orphans:
    """Adopts orphans from the start, reaps them as they end, and kills them when the server ends."""

    def __init__(self, is_worker: Callable[[int], bool]) -> None:
        self._is_worker = is_worker
        self._loop = asyncio.get_running_loop()
        libc_prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._timer = self._loop.call_later(_REAP_SECONDS, self._tick)

    def _tick(self) -> None:
        self._reap()
        self._timer = self._loop.call_later(_REAP_SECONDS, self._tick)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are no children
            while True:
                # WNOWAIT: find out whose status it is before taking it.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or self._is_worker(ended.si_pid):
                    return  # its WorkerProcess is about to reap it; the next tick reaps the others
                os.waitpid(ended.si_pid, os.WNOHANG)

    async def end(self) -> None:
        """Kill and reap every remaining child. All workers must have ended."""
        self._timer.cancel()
        deadline = self._loop.time() + _KILL_TIMEOUT_SECONDS  # a process in an uninterruptible wait dies later
        while (children := psutil.Process().children()) and self._loop.time() < deadline:
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            await asyncio.sleep(_POLL_SECONDS)
            self._reap()
