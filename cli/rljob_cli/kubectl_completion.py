"""`kubectl_complete-rljob`: what kubectl runs to complete `kubectl rljob ...`.

Prints what the completion of `rljob` prints, in the protocol of kubectl's plugins: one candidate per line, then a
directive.
"""

import contextlib
import io
import os
import shlex
import sys

from rljob_cli.main import app

_DEFAULT, _NO_FILES = ":0", ":4"
"""kubectl's directives: complete file names, or nothing else."""


def main() -> None:
    """Complete the last argument."""
    typed = ["rljob", *(sys.argv[1:] or [""])]
    position = {"COMP_WORDS": shlex.join(typed), "COMP_CWORD": str(len(typed) - 1)}
    os.environ |= position | {"_RLJOB_COMPLETE": "complete_bash"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        app(prog_name="rljob")
    candidates = printed.getvalue().split()
    print("\n".join([*candidates, _NO_FILES if candidates else _DEFAULT]))


if __name__ == "__main__":
    main()
