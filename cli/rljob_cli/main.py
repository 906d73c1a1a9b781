"""The `rljob` command, also installed as `kubectl rljob`: its commands are declared in `arguments`."""

import os
import sys
from pathlib import Path

from rljob_cli.app import app
from rljob_cli.arguments import cluster, jobs, runs
from rljob_cli.exits import EXIT_FAILED
from rljob_cli.terminal import clean_streams

__all__ = ["app", "cluster", "jobs", "main", "runs"]


def find_obstacle(platform: str, python: tuple[int, ...]) -> str:
    """Return why rljob does not run here; empty if it does. uv installs its wheels for each Python."""
    if platform == "win32":
        return "rljob runs on Linux and macOS; on Windows, install it in WSL2 (wsl --install)"
    return "rljob is not tested with this Python; uv tool install --python 3.13 rljob" if python >= (3, 14) else ""


def main() -> None:
    if obstacle := find_obstacle(sys.platform, sys.version_info[:2]):
        sys.exit(obstacle)
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
