"""A program that is started for each episode: agent.runner.command.

It gets the environment of the worker, the addresses and keys of the model, and RLJOB_EPISODE, a file with the
EpisodeCall as JSON. Its output goes to the server's log. The last line of its standard output may be the reward: a
number, or a JSON object with reward, rewards, state or info. Invariant: its process group has ended with the episode.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.wire.contract import ENV_EPISODE, MAX_EPISODE_REPLY_BYTES
from rljob_service.worker.code.code_output import describe_end
from rljob_service.worker.code.follower import Follower
from rljob_service.worker.episodes import reply
from rljob_service.worker.episodes.calls import write_call
from rljob_service.worker.episodes.ending import Waiter
from rljob_service.worker.episodes.types import Episode
from rljob_service.worker.settings import TEARDOWN_SECONDS

_MAX_LINE_BYTES = MAX_EPISODE_REPLY_BYTES
"""Limit of the last line, which may be the reply."""
_TOO_LONG = b"..."
_STDOUT = 1
_MAX_ERROR_BYTES = 4 << 10
_NUM_ERROR_LINES = 12
_TERMINATE_SECONDS = TEARDOWN_SECONDS - 2
"""Between SIGTERM and SIGKILL, if the program must end before its time."""
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|nan|inf(inity)?)", re.IGNORECASE)


class CommandFailedError(Exception):
    """The program ended with another exit code than 0."""


class Command:
    """Plays episodes with a program. Made once for each worker."""

    def __init__(self, command: Sequence[str], working_dir: str | None = None) -> None:
        self._folder = working_dir
        if working_dir is not None and not os.access(working_dir, os.R_OK | os.X_OK):
            raise UserError(
                f"agent.runner.workingDir: {working_dir} cannot be read; correct the path: on a cluster it is a folder "
                "of the runner's image"
            )
        self.command = [_find_program(command[0], working_dir), *command[1:]]

    def play(self, episode: Episode, waiter: Waiter) -> Any:
        """Return what the last line of the program's output means. Raise CommandFailedError if it failed."""
        with tempfile.NamedTemporaryFile("w", prefix="rljob-episode-", suffix=".json") as file:
            json.dump(write_call(episode), file)
            file.flush()
            output = _Output()
            code = _run(self.command, self._folder, {**os.environ, ENV_EPISODE: file.name}, output, waiter)
        if code != 0:
            raise CommandFailedError(f"{Path(self.command[0]).name} {describe_end(code)}{output.last_errors()}")
        return read_last_line(output.last_line)


def _find_program(name: str, folder: str | None) -> str:
    """Return the path of the program. `python` may be missing on PATH: then it is the worker's."""
    own = os.path.dirname(sys.executable)
    if os.sep in name:
        path = os.path.join(folder or "", name)
        found = path if os.access(path, os.X_OK) and not os.path.isdir(path) else None
    else:
        found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), own)))
    if found is None:
        raise UserError(
            f"agent.runner.command: {name} was not found; correct it, or add it to the runner's image "
            "(agent.runner.image)"
        )
    return os.path.abspath(found)


def _run(
    command: Sequence[str], folder: str | None, environment: Mapping[str, str], output: _Output, waiter: Waiter
) -> int:
    """Run the program to its end, and return its exit code. Its process group ends here in any case."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    takers = {process.stdout: output.take, process.stderr: output.take_error}
    with process, Follower(process, takers) as follower:
        has_ended = False
        try:
            has_ended = follower.wait()
        finally:
            waiter.begin_teardown()
            if not has_ended:
                _signal_group(process, signal.SIGTERM)
                follower.wait(_TERMINATE_SECONDS)
            _signal_group(process, signal.SIGKILL)
            follower.read_rest()
    return process.returncode


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, number)


class _Output:
    """What is kept of a program's output: its last line, and the last lines of its errors. All goes to the log."""

    def __init__(self) -> None:
        self._last_line = b""
        self._line = b""
        """The one that has no end yet."""
        self._errors = b""

    @property
    def last_line(self) -> bytes:
        return self._line if self._line.strip() else self._last_line

    def take(self, data: bytes) -> None:
        _log(data)
        *lines, self._line = (self._line + data).split(b"\n")
        self._last_line = next((line for line in reversed(lines) if line.strip()), self._last_line)
        if len(self._line) > _MAX_LINE_BYTES:
            self._line = _TOO_LONG

    def take_error(self, data: bytes) -> None:
        _log(data)
        self._errors = (self._errors + data)[-_MAX_ERROR_BYTES:]

    def last_errors(self) -> str:
        lines = self._errors.decode(errors="replace").strip().splitlines()[-_NUM_ERROR_LINES:]
        return ":\n" + "\n".join(lines) if lines else ", without a word on standard error"


def _log(data: bytes) -> None:
    """Write to the worker's output, which the server passes on within its budget."""
    while data:
        data = data[os.write(_STDOUT, data) :]


def read_last_line(line: bytes) -> Any:
    """Return the reward, or the fields of a reply; None for a line of another kind."""
    line = line.strip()
    if _NUMBER.fullmatch(line):
        return float(line)
    if not line.startswith(b"{"):
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if any(key in fields for key in reply.KEYS) else None
