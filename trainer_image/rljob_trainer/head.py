"""`python -m rljob_trainer.head`: the head Pod's program.

Owns signals, and turning an error into an exit code and a last line. Leaves what runs to `wiring`. Invariant: Ray's
environment is set before anything imports Ray, which reads it at import and would send no token for ever after.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

from rljob_api.contract import ExitCode
from rljob_api.errors import TransientError, UserError
from rljob_trainer.head_environment import Environment, read_environment
from rljob_trainer.ray_head import ray_environment

log = logging.getLogger(__name__)

_TERMINATION_LOG = Path("/dev/termination-log")
"""Where Kubernetes reads a container's last words."""


async def _run_until_signalled(environment: Environment) -> None:
    """SIGTERM and SIGINT cancel the run, so that everything it started is ended in order."""
    from rljob_trainer.wiring import run_head  # late: it imports Ray

    def take_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)

    task = asyncio.create_task(run_head(environment, on_ray=take_signals))
    take_signals()
    try:
        await task
    except asyncio.CancelledError:
        raise TransientError("stopped by a signal; a restart resumes from the last checkpoint") from None


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.update(ray_environment())
    try:
        asyncio.run(_run_until_signalled(read_environment(dict(os.environ))))
    except UserError as error:
        return _last_words(str(error), ExitCode.USER)
    except TransientError as error:
        return _last_words(str(error), ExitCode.INFRASTRUCTURE)
    except Exception as error:  # unknown: loud, and worth another try within the role's budget
        log.exception("unexpected error")
        return _last_words(f"{type(error).__name__}: {error}", ExitCode.INFRASTRUCTURE)
    return ExitCode.SUCCEEDED


def _last_words(message: str, code: ExitCode) -> int:
    with contextlib.suppress(OSError):
        _TERMINATION_LOG.write_text(message[:4000])
    print(message, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
