"""How far downloads from object storage are while a job is checked: one line at the bottom of the terminal.

Owns the line alone: what is downloaded says how far it is in the log (rljob_inputs.objects). Invariant: nothing is
written to what is no terminal, and nothing stays in a terminal.
"""

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator
from typing import TextIO

from rljob_cli.terminal import clean

_LOGGER = "rljob_inputs.objects"


class _Line(logging.Handler):
    """Replaces the line by each message."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.INFO)
        self._stream, self._length = stream, 0

    def emit(self, record: logging.LogRecord) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._write(clean(record.getMessage())[:width])

    def erase(self) -> None:
        if self._length:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text.ljust(self._length)}")
        self._stream.flush()
        self._length = len(text)


@contextlib.contextmanager
def show_downloads(*, is_wanted: bool, stream: TextIO | None = None) -> Iterator[None]:
    """Within, show downloads, if `stream` (default: stderr) is a terminal. `is_wanted`: false for --output json."""
    target = stream or sys.stderr
    if not is_wanted or not target.isatty():
        yield
        return
    line, logger = _Line(target), logging.getLogger(_LOGGER)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(line)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        line.erase()
        logger.removeHandler(line)
        logger.setLevel(level)
        logger.propagate = propagates
