"""Exit codes, and the messages of the errors that lead to them.

0: success. 1: the job failed, or the cluster refused. 2: the input is invalid. 130: interrupted.
"""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from rljob_api.errors import RLJobError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
P = ParamSpec("P")


def guard(command: Callable[P, int]) -> Callable[P, int]:
    """Print RLJob's own errors, and files that cannot be read or written, as one message."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except RLJobError as error:
            print(error, file=sys.stderr)
        except OSError as error:
            if error.filename is None:  # not a file of the user: a closed pipe, or a defect
                raise
            print(f"{error.filename}: {error.strerror}; fix the file, or pass another path", file=sys.stderr)
        return EXIT_BAD_INPUT

    return guarded
