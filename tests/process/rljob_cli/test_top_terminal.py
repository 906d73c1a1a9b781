"""`rljob top` in terminals of 80 and 120 columns: what they show."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_cli.exits import EXIT_INTERRUPTED
from tests.support.top_program import PODS
from tests.support.waiting import DEADLINE_SECONDS

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COLOURS = {"31": "red", "32": "green", "33": "yellow"}
DATA = Path(__file__).parents[2] / "data" / "top"
_CLEAR = "\x1b[H"
"""rich clears a terminal with it."""


class Terminal:
    """The program's terminal, and all that it has written."""

    def __init__(self, columns: int, rows: int, *arguments: str, **variables: str) -> None:
        self.file, program_side = os.openpty()
        fcntl.ioctl(program_side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
        self.program = subprocess.Popen(
            [sys.executable, "-m", "tests.support.top_program", *arguments],
            stdin=program_side,
            stdout=program_side,
            stderr=program_side,
            env={**environment, "TERM": "xterm-256color", **variables},
            # Whether or not this process ignores it, as one that a shell started in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self._program_side = program_side
        self.text = ""

    def read_until(self, wanted: str) -> str:
        """Return the frame that has the text: all since the last one began."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while wanted not in _ESCAPES.sub("", self.frame):
            is_over = self.program.poll() is not None
            assert self._read(deadline, 1.0) or not is_over, f"no {wanted!r} in {self.frame!r}"
            assert time.monotonic() < deadline, f"no {wanted!r} in {self.frame!r}"
        return _ESCAPES.sub("", self.frame)

    @property
    def frame(self) -> str:
        return self.text.rpartition(_CLEAR)[2]

    def read_all(self) -> str:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.program.poll() is None or select.select([self.file], [], [], 0)[0]:
            self._read(deadline, 0.1)
            assert time.monotonic() < deadline, self.text
        return self.text

    def _read(self, deadline: float, longest: float) -> bool:
        if not select.select([self.file], [], [], min(longest, max(0.0, deadline - time.monotonic())))[0]:
            return False
        self.text += os.read(self.file, 65536).decode().replace("\r\n", "\n")
        return True

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
        os.close(self.file)
        os.close(self._program_side)


@pytest.fixture
def start() -> Iterator[object]:
    started: list[Terminal] = []

    def begin(columns: int, rows: int, *arguments: str, **variables: str) -> Terminal:
        started.append(Terminal(columns, rows, *arguments, **variables))
        return started[-1]

    yield begin
    for terminal in started:
        terminal.close()


def picture(text: str) -> str:
    """What a person sees, with the colours as words: Running{green}."""
    text = re.sub(r"\x1b\[([0-9;]*)m([^\x1b]*)\x1b\[0m", _mark, text)
    return "\n".join(line.rstrip() for line in _ESCAPES.sub("", text).splitlines()) + "\n"


def _mark(found: re.Match[str]) -> str:
    colour = _COLOURS.get(found[1])
    return f"{found[2].rstrip()}{{{colour}}}" + found[2][len(found[2].rstrip()) :] if colour else found[2]


@pytest.mark.parametrize(("columns", "variables"), [(80, {}), (120, {"NO_COLOR": "1"})])
def test_jobs_and_one_job_fit_the_terminal(start, golden, columns, variables):
    text = start(columns, 40, **variables).read_all()
    assert max(len(line) for line in _ESCAPES.sub("", text).splitlines()) <= columns
    assert text.count("412/1000") == 2, "a number is never cut"
    assert ("{red}" in picture(text)) == (not variables)
    golden(DATA / f"{columns}.txt", picture(text))


def test_every_pod_is_shown_again_until_an_interrupt(start):
    terminal = start(80, 16, "--watch")
    for _ in range(2):
        for pod in PODS:
            terminal.read_until(pod["metadata"]["name"])
        terminal.text = ""
    terminal.program.send_signal(signal.SIGINT)
    terminal.read_all()
    assert terminal.program.wait() == EXIT_INTERRUPTED
