"""Reads files of strangers in a child process with a limit of CPU time and of memory: chat templates, tables, archives.

One bound for all formats: whatever a file makes its library do costs the child, and the error names the file. Leaves to
callers what is read. Invariant: no file takes longer, or more of the machine, than the limits, except by waiting.
"""

import functools
import mmap
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rljob_api.errors import UserError

P = ParamSpec("P")
Result = TypeVar("Result")
_CPU_SECONDS = 180
"""Checks of large jobs take about ten, on a fast machine."""
_MEMORY_BYTES = 8 << 30
_POLL_SECONDS = 0.1
_CAN_FORK = sys.platform == "linux"
_board = mmap.mmap(-1, mmap.PAGESIZE)
"""Shared with the child: what it reads, for the error after it was killed."""
_open: list[str] = []
_works: list[Callable[[], Any]] = []
"""What the child does: no argument needs to be pickled."""


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Name what is read meanwhile: a file, or a part."""
    _open.append(place)
    _note()
    try:
        yield
    finally:
        _open.remove(place)
        _note()


def _note() -> None:
    _board[:] = " or ".join(dict.fromkeys(_open)).encode(errors="replace")[: len(_board)].ljust(len(_board))


def bounded(work: Callable[P, Result]) -> Callable[P, Result]:
    """Run a function in a child process, where the system is Linux. It returns, or raises, what can be pickled. Raise
    UserError if the child exceeds a limit."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        if not _CAN_FORK:
            return work(*args, **kwargs)
        _note()
        begin = functools.partial(_works.append, functools.partial(work, *args, **kwargs))
        # A fork imports nothing anew.
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), begin) as pool:
            pid = pool.submit(os.getpid).result()
            resource.prlimit(pid, resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
            future = pool.submit(_work)
            try:
                while not wait([future], _POLL_SECONDS).done:
                    with suppress(OSError):  # it may have ended
                        if int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE > _MEMORY_BYTES:
                            os.kill(pid, signal.SIGKILL)
                return future.result()
            except BrokenProcessPool:
                raise UserError(
                    f"reading {_board[:].decode(errors='replace').strip() or 'it'} took more than {_CPU_SECONDS} s of "
                    f"CPU time, or more memory than there is or {_MEMORY_BYTES >> 30} GiB; use another file: it may "
                    "expand to far more than its size"
                ) from None
            except BaseException:  # of Ctrl-C, too
                os.kill(pid, signal.SIGKILL)
                raise

    return run


def _work() -> Any:
    return _works[-1]()
