"""How a program of a Pod ends: one message that says why, where Kubernetes and `rljob run` read it.

Standard library only: every program imports it before anything that can fail.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from rljob_api.wire.contract import ENV_TERMINATION_LOG, ExitCode
from rljob_api.wire.logs import print_last_line
from rljob_api.wire.redaction import redact_environment

ERROR_PREFIX = "error: "
"""Starts the last line of a program that gives up, and its termination message."""
GPU_FAULT_PREFIX = "GPU fault: "
"""Starts the message of a program whose GPU does not work: the operator avoids its node from then on."""
RESULT_PREFIX = "result: "
"""Starts the termination message of a program that has succeeded, and whose result is small enough for it."""
_DEFAULT_PATH = "/dev/termination-log"
_MAX_BYTES = 4000
"""Kubernetes keeps 4,096."""


def end_program(message: str, code: ExitCode) -> ExitCode:
    """Write the termination message, print it as the last line, and return the exit code."""
    text = redact_environment(os.environ).hide(f"{ERROR_PREFIX}{message}")
    _write(text)  # the last line of the log explains the end, too
    print_last_line(text)
    return code


def leave_result(items: Sequence[str]) -> int:
    """Write as many of the JSON `items` as the termination message has room for, as one JSON array. Return the number
    of the others."""
    kept, room = list[str](), _MAX_BYTES - len(RESULT_PREFIX) - len("[]")
    for item in items:
        room -= len(item.encode()) + len(",")
        if room < 0:
            break
        kept.append(item)
    _write(f"{RESULT_PREFIX}[{','.join(kept)}]")
    return len(items) - len(kept)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        path = Path(os.environ.get(ENV_TERMINATION_LOG) or _DEFAULT_PATH)
        path.write_bytes(text.encode(errors="replace")[:_MAX_BYTES])
