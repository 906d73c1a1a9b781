"""Runs commands of the system."""

import subprocess


class ClusterError(Exception):
    """What was asked for cannot be done here; the message says why, and what to do."""


def run(*command: str, input: str | None = None) -> str:
    """Return the output of a command. Raise ClusterError with the end of its error output if it fails."""
    try:
        done = subprocess.run(command, input=input, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]}: not found on PATH; install it") from error
    if done.returncode:
        raise ClusterError(f"{' '.join(command[:6])}: exit code {done.returncode}: {done.stderr.strip()[-1500:]}")
    return done.stdout


def try_run(*command: str, timeout_seconds: float | None = None) -> bool:
    """Return whether a command succeeds. A missing program and a timeout count as failures."""
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout_seconds).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
