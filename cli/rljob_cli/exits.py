"""Exit codes, and the messages of the errors that lead to them.

0: success. 1: the job failed, or the cluster refused. 2: the input is invalid. 130: interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from rljob_api.errors import RLJobError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def guard(command: Callable[[], int]) -> int:
    """Run a command; print RLJob's own errors, and files that cannot be read or written, as one message."""
    try:
        return command()
    except RLJobError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        if error.filename is None:  # not a file of the user: a closed pipe, or a defect
            raise
        print(f"{error.filename}: {error.strerror}; fix the file, or pass another path", file=sys.stderr)
        return EXIT_BAD_INPUT
