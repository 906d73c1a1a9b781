"""How a program of a Pod ends: one message that says why, where Kubernetes and `rljob run` read it.

Standard library only: every program imports it before anything that can fail.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from rljob_api.wire.contract import ENV_TERMINATION_LOG, ExitCode

ERROR_PREFIX = "error: "
"""Starts the last line of a program that gives up, and its termination message."""
GPU_FAULT_PREFIX = "GPU fault: "
"""Starts the message of a program whose GPU does not work: the operator avoids its node from then on."""
_DEFAULT_PATH = "/dev/termination-log"
_MAX_BYTES = 4000
"""Kubernetes keeps 4,096."""


def end_program(message: str, code: ExitCode) -> ExitCode:
    """Write the termination message, print it as the last line, and return the exit code."""
    text = f"{ERROR_PREFIX}{message}"
    with contextlib.suppress(OSError):  # the last line of the log then explains the end
        path = Path(os.environ.get(ENV_TERMINATION_LOG) or _DEFAULT_PATH)
        path.write_bytes(text.encode(errors="replace")[:_MAX_BYTES])
    print(text, file=sys.stderr, flush=True)
    return code
