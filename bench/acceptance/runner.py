"""Runs checks one after the other, each within its limit, with the output of its commands in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from acceptance.checks import Check
from acceptance.judgements import BrokenError, Ended

State = Literal["held", "failed", "skipped"]
_STOP_SECONDS = 30
"""`rljob run` stops its Pods after SIGTERM."""
_MIN_SECONDS = 0.1


@dataclass(frozen=True)
class Result:
    name: str
    state: State
    found: str
    """What was found, what does not hold, or why it was skipped."""
    seconds: float = 0.0
    log: str | None = None
    """File with the output."""


def run_checks(
    checks: Sequence[Check], logs: Path, *, has_gpu: bool, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Result]:
    """Yield each result when it is known. `folder`: where the commands run. `environment`: None is this process's."""
    logs.mkdir(parents=True, exist_ok=True)
    held: set[str] = set()
    for check in checks:
        if check.needs_gpu and not has_gpu:
            result = Result(check.name, "skipped", "needs a GPU")
        elif check.after is not None and check.after not in held:
            result = Result(check.name, "skipped", f"needs what {check.after} leaves")
        else:
            result = _run(check, logs / f"{check.name.replace(' ', '-').replace(',', '')}.log", folder, environment)
        if result.state == "held":
            held.add(check.name)
        yield result


def _run(check: Check, log: Path, folder: Path, environment: Mapping[str, str] | None) -> Result:
    started = time.monotonic()
    ended: list[Ended] = []
    with log.open("w") as file:
        for command in check.commands:
            ended.append(_end(command, check.seconds - (time.monotonic() - started), folder, environment))
            file.write(f"$ {' '.join(command)}\n{ended[-1].output}\n")
            if ended[-1].code is None:
                break
    state, found = _judge(check, ended)
    return Result(check.name, state, found, time.monotonic() - started, str(log) if check.commands else None)


def _judge(check: Check, ended: Sequence[Ended]) -> tuple[State, str]:
    if any(each.code is None for each in ended):
        return "failed", f"did not end within {check.seconds} s"
    try:
        return "held", check.judge(ended)
    except BrokenError as error:
        return "failed", str(error)
    except (OSError, LookupError, ValueError) as error:  # files and figures that are not there
        return "failed", f"{type(error).__name__}: {error}"


def _end(command: Sequence[str], seconds: float, folder: Path, environment: Mapping[str, str] | None) -> Ended:
    """Return the ended command. One that takes longer is stopped with all processes of its session."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=max(_MIN_SECONDS, seconds))
        return Ended(process.returncode, output)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=_STOP_SECONDS)
            return Ended(None, output)
    return Ended(None, "")
