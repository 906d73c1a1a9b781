"""Runs commands of the system, and ties child processes to their parent."""

from __future__ import annotations

import ctypes
import signal
import subprocess

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class CommandError(Exception):
    """A command failed; the message contains the end of its error output."""


def run(*command: str, input: str | None = None) -> str:
    """Return the output of a command. Raise CommandError if it fails."""
    done = subprocess.run(command, input=input, capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"{' '.join(command[:6])}: exit code {done.returncode}: {done.stderr.strip()[-1500:]}")
    return done.stdout


def try_run(*command: str, timeout_seconds: float | None = None) -> bool:
    """Return whether a command succeeds. A missing program and a timeout count as failures."""
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout_seconds).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the child when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
