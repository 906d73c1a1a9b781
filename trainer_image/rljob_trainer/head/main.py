"""`python -m rljob_trainer.head`: the head Pod's program.

Owns signals and exit codes. Invariants: Ray's environment is set before the first import of
Ray, which otherwise never sends the token; a signal ends the process within the Pod's grace period.
"""

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from rljob_api.errors import RLJobError, TransientError
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.logs import configure_logging
from rljob_api.wire.termination import end_program
from rljob_trainer.failures.configuration import explain_end
from rljob_trainer.head.environment import Environment, read_environment
from rljob_trainer.ranks.ray_node import ray_environment

log = logging.getLogger(__name__)

_STOP_SHARE = 0.75
"""Part of the Pod's grace period, at most, from a signal to the exit. Without it, the exit would wait for a library's
thread, such as a download."""
_FAIL_SECONDS = 10.0
"""Maximum time from an error, the end of what a signal stops, or success to the exit: a thread that waits for a dead
Ray head never ends."""
_OPEN_FILES = 65_536
"""Each request in flight is a connection, and the usual soft limit is 1,024. Not the hard limit: some libraries iterate
over all possible descriptors."""
_STOPPED = "stopped by a signal; a restart resumes from the last checkpoint"


def import_transformers_alone() -> None:
    """Import it while it finds no torch, which it would import with any tokenizer: seconds, and hundreds of MiB."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import transformers  # noqa: F401
    finally:
        del sys.modules["torch"]


async def _run_until_signalled(environment: Environment) -> None:
    """Run the job. SIGTERM and SIGINT cancel it, so that everything it started ends in order."""
    if not environment.job.spec.model.trust_remote_code:  # code of a tokenizer may need torch
        import_transformers_alone()
    from rljob_trainer.head.wiring import run_head  # here: it imports Ray

    reports: list[str] = []

    def end_stopped() -> ExitCode:
        message = "; ".join([_STOPPED, *(reports or ["it did not end in time"])])
        return end_program(message, ExitCode.INFRASTRUCTURE)

    def stop() -> None:
        force_exit_after(_STOP_SHARE * environment.grace_seconds, end_stopped)
        task.cancel()

    def install_handlers() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    task = asyncio.create_task(run_head(environment, on_ray=install_handlers, on_stopped=reports.append))
    install_handlers()
    try:
        await task
    except asyncio.CancelledError:
        force_exit_after(_FAIL_SECONDS, end_stopped)
        raise TransientError("; ".join([_STOPPED, *reports])) from None
    except Exception as error:
        message, code = explain_end(error)
        force_exit_after(_FAIL_SECONDS, lambda: end_program(message, code))
        raise


def force_exit_after(seconds: float, end: Callable[[], int]) -> None:
    """Exit after `seconds` with the code that `end` returns then, unless the process ends before."""
    timer = threading.Timer(seconds, lambda: os._exit(end()))
    timer.daemon = True
    timer.start()


def _raise_on_signal(number: int, _: FrameType | None) -> None:
    """Handle signals until a run exists to be cancelled. PID 1 of a container has no default action for SIGTERM."""
    raise TransientError(_STOPPED)


def main() -> int:
    configure_logging()
    os.environ.update(ray_environment())
    _raise_open_files_limit()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _raise_on_signal)
        asyncio.run(_run_until_signalled(read_environment(dict(os.environ))))
    except Exception as error:
        if not isinstance(error, RLJobError):
            log.exception("unexpected error")
        return end_program(*explain_end(error))
    # A tracker's client may wait for its server, and trainers keep their GPUs while the head lives.
    force_exit_after(_FAIL_SECONDS, lambda: ExitCode.SUCCEEDED)
    return ExitCode.SUCCEEDED


def _raise_open_files_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
