"""The `rljob` command, also installed as `kubectl rljob`: its commands are declared in `arguments`."""

import os
import sys
from pathlib import Path

from rljob_cli.app import app
from rljob_cli.arguments import cluster, jobs, runs
from rljob_cli.exits import EXIT_FAILED
from rljob_cli.terminal import clean_streams

__all__ = ["app", "cluster", "jobs", "main", "runs"]


def main() -> None:
    clean_streams()
    try:
        try:
            app(prog_name="kubectl rljob" if Path(sys.argv[0]).name == "kubectl-rljob" else None)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `rljob trajectories | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
