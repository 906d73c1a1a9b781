"""`python -m rljob_trainer.head`: the head Pod's program.

Owns signals, and turning an error into an exit code and a last line. Leaves what runs to `wiring`, and what is saved
before the end to `driver`. Invariants: Ray's environment is set before anything imports Ray, which reads it at import
and would send no token for ever after; and a signal ends the process within the Pod's grace, whatever it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.wire.contract import ExitCode
from rljob_trainer.head.environment import Environment, read_environment
from rljob_trainer.ranks.ray_head import ray_environment

log = logging.getLogger(__name__)

_TERMINATION_LOG = Path("/dev/termination-log")
"""Where Kubernetes reads a container's last words."""


_STOP_SECONDS = 45.0
"""From a signal to the end at the latest: less than the 60 s that the Pod is given, after which SIGKILL comes. A
thread in a library (a download, say) would else be waited for."""

_FAIL_SECONDS = 10.0
"""From an error to the end at the latest: a thread that waits for a Ray head that has died waits for ever."""

_OPEN_FILES = 65_536
"""Each request in flight is a connection, and the usual soft limit is 1,024. Not all that the hard limit allows: some
libraries go through each file that could be open."""

_STOPPED = "stopped by a signal; a restart resumes from the last checkpoint"


async def _run_until_signalled(environment: Environment) -> None:
    """SIGTERM and SIGINT cancel the run, so that everything it started is ended in order."""
    from rljob_trainer.head.wiring import run_head  # late: it imports Ray

    def stop() -> None:
        end_at_the_latest(_STOP_SECONDS, f"{_STOPPED} (something did not end in time)", ExitCode.INFRASTRUCTURE)
        task.cancel()

    def take_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    task = asyncio.create_task(run_head(environment, on_ray=take_signals))
    take_signals()
    try:
        await task
    except asyncio.CancelledError:
        raise TransientError(_STOPPED) from None
    except Exception as error:
        end_at_the_latest(_FAIL_SECONDS, *_explain(error))
        raise


def end_at_the_latest(seconds: float, message: str, code: ExitCode) -> None:
    """End this process after that time, with these last words, should it not have ended by itself."""
    timer = threading.Timer(seconds, lambda: os._exit(_last_words(message, code)))
    timer.daemon = True
    timer.start()


def _stop_at_once(number: int, _: FrameType | None) -> None:
    """Until there is a run to cancel. The first process of a container has no default action for SIGTERM: it would
    be lost."""
    raise TransientError(_STOPPED)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.update(ray_environment())
    _raise_open_files_limit()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop_at_once)
        asyncio.run(_run_until_signalled(read_environment(dict(os.environ))))
    except Exception as error:
        if not isinstance(error, RLJobError):
            log.exception("unexpected error")
        return _last_words(*_explain(error))
    return ExitCode.SUCCEEDED


def _raise_open_files_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _explain(error: Exception) -> tuple[str, ExitCode]:
    """Last words and exit code. What nobody expected is worth another try within the role's budget."""
    if isinstance(error, UserError):
        return str(error), ExitCode.USER
    words = str(error) if isinstance(error, TransientError) else f"{type(error).__name__}: {error}"
    return words, ExitCode.INFRASTRUCTURE


def _last_words(message: str, code: ExitCode) -> int:
    with contextlib.suppress(OSError):
        _TERMINATION_LOG.write_text(message[:4000])
    print(message, file=sys.stderr, flush=True)
    return code
