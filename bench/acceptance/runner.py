"""Runs steps one after the other, each within its limit. What is known is on the disk at once.

Owns the files of a step, `NAME.log` and `NAME.json`: the log grows while its commands run, and the result is written
before and after. Invariant: a step replaces its own files alone, so results of other calls stay; and one whose machine
went away while it ran has a result that says so, with a log up to then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Literal

from acceptance.checks import Check
from acceptance.judgements import BrokenError, Ended

State = Literal["held", "failed", "skipped"]
_STOP_SECONDS = 30
"""`rljob run` stops its Pods after SIGTERM."""
_MIN_SECONDS = 0.1
_END_CHARACTERS = 4000
"""How much of the log is in the result."""


@dataclass(frozen=True)
class Result:
    name: str
    state: State
    found: str
    """What was found, what does not hold, or why it was skipped."""
    seconds: float = 0.0
    started: str = ""
    machine: Mapping[str, str] | None = None
    """Device, driver and versions."""
    log: str | None = None
    """File with the output."""
    end: str = ""
    """The end of the log, unless the step held."""


def run_checks(
    checks: Sequence[Check],
    results: Path,
    *,
    has_gpu: bool,
    folder: Path,
    machine: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Result]:
    """Yield each result when it is known and written. `results`: folder of the files. `folder`: where the commands run.
    `environment`: None is this process's."""
    results.mkdir(parents=True, exist_ok=True)
    for check in checks:
        started, log = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", results / f"{check.name}.log"
        if check.needs_gpu and not has_gpu:
            result = Result(check.name, "skipped", "needs a GPU", started=started, machine=machine)
        else:
            result = Result(check.name, "failed", "did not end", 0.0, started, machine, str(log))
            _write(results, result)
            state, found, seconds = _run(check, log, folder, environment)
            end = "" if state == "held" else log.read_text(errors="replace")[-_END_CHARACTERS:]
            result = Result(check.name, state, found, seconds, started, machine, str(log), end)
        _write(results, result)
        yield result


def read_results(checks: Sequence[Check], results: Path) -> Iterator[Result]:
    """Yield what was written last about each step, in the order of the steps."""
    for check in checks:
        with contextlib.suppress(FileNotFoundError):
            yield Result(**json.loads((results / f"{check.name}.json").read_text()))


def _write(results: Path, result: Result) -> None:
    (results / f"{result.name}.json").write_text(json.dumps(asdict(result), indent=2))


def _run(check: Check, log: Path, folder: Path, environment: Mapping[str, str] | None) -> tuple[State, str, float]:
    started = time.monotonic()
    ended: list[Ended] = []
    log.unlink(missing_ok=True)
    with log.open("a+", errors="replace") as file:  # commands append, also when it is read meanwhile
        for command in check.commands:
            ended.append(_end(command, file, check.seconds - (time.monotonic() - started), folder, environment))
            if ended[-1].code is None:
                break
    return *_judge(check, ended), time.monotonic() - started


def _judge(check: Check, ended: Sequence[Ended]) -> tuple[State, str]:
    if any(each.code is None for each in ended):
        return "failed", f"did not end within {check.seconds} s"
    try:
        return "held", check.judge(ended)
    except BrokenError as error:
        return "failed", str(error)
    except (OSError, LookupError, ValueError) as error:  # files and figures that are not there
        return "failed", f"{type(error).__name__}: {error}"


def _end(
    command: Sequence[str], log: IO[str], seconds: float, folder: Path, environment: Mapping[str, str] | None
) -> Ended:
    """Return the ended command, whose output is appended to the log. One that takes longer is stopped with all
    processes of its session."""
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    begin = log.seek(0, os.SEEK_END)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    code = _wait(process, max(_MIN_SECONDS, seconds))
    log.seek(begin)
    output = log.read()
    log.write("\n")
    return Ended(code, output)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
    finally:  # also if this program is stopped: a job that goes on would hold the GPU
        if process.returncode is None:
            _stop(process)
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
