"""Exit codes, and the messages of the errors that lead to them.

| code | name | when |
|---|---|---|
| 0 | | success |
| 1 | EXIT_FAILED | the job failed, a result is invalid, the cluster refused, or the reader of a pipe went away |
| 2 | EXIT_BAD_INPUT | the arguments or the files are wrong: nothing was started |
| 130 | EXIT_INTERRUPTED | Ctrl-C; `run` also by SIGTERM and SIGHUP |
"""

import errno
import functools
import os
from collections.abc import Callable
from typing import ParamSpec

from rljob_api.errors import RLJobError
from rljob_cli.output import print_error
from rljob_inputs.machine.installation import describe_installation, find_extra

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
P = ParamSpec("P")


def guard(command: Callable[P, int]) -> Callable[P, int]:
    """Print RLJob's own errors, files that cannot be read or written, and missing extras as one message."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except RLJobError as error:
            print_error(error, code := getattr(error, "exit_code", EXIT_BAD_INPUT))
            return code
        except ModuleNotFoundError as error:  # for what only some inputs need, such as a Parquet file
            if not (extra := find_extra(error.name or "")):
                raise
            print_error(f"{error.name} is not installed; {describe_installation(extra)}", EXIT_BAD_INPUT)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                print_error(f"{error.strerror}; free disk space, or write to another disk", EXIT_FAILED)
                return EXIT_FAILED
            if error.filename is None and os.stat(".").st_nlink:  # a closed pipe, or a defect
                raise
            what = "the current folder is deleted; change to another"
            if error.filename:
                what = f"{error.filename}: {error.strerror}; fix the file, or pass another path"
            print_error(what, EXIT_BAD_INPUT)
        return EXIT_BAD_INPUT

    return guarded
