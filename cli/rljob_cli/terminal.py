"""Text on its way to the terminal: the streams through which all output of `rljob` goes.

Answers of models, messages of rewards, names and logs are written by others. Their control characters could change what
a terminal shows, its title, or the clipboard. Invariant: no control character of a text reaches a stream, except for
line breaks and tabs, and the colours of a log's line; only rich, which draws tables and live views, writes others.
Streams in pipes are cleaned too: their reader may write to a terminal.
"""

import io
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_NOT_LAYOUT = re.compile(r"\r(?=\n)|(\r+)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]+")
_NOT_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)|[\x00-\x08\x0a-\x1f\x7f-\x9f]+")
_RESET = "\x1b[0m"


def clean(text: str) -> str:
    """Return the text in one line, without control characters."""
    return _CONTROLS.sub(" ", text)


def clean_lines(text: str) -> str:
    """Return the text without control characters. Line breaks and tabs stay; a carriage return, with which the end of
    a line could hide its start, becomes a space."""
    return _NOT_LAYOUT.sub(lambda found: " " if found[1] else "", text)


def clean_colours(line: str) -> str:
    """Return one line with no other control characters than tabs and colours, which end with it."""
    cleaned = _NOT_COLOUR.sub(lambda found: found[1] or " ", line)
    return cleaned + _RESET if "\x1b" in cleaned else cleaned


class CleanStream:
    """A text stream that writes texts without control characters. All else is the stream's own.

    A carriage return stays where it hides nothing: at the start of a write, on a line that is empty or began with one.
    So libraries draw their progress bars.
    """

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream
        self._may_return = True
        """Whether a carriage return hides nothing."""

    @property
    def rich_proxied_file(self) -> TextIO:
        """rich writes here: what it draws has escape sequences of its own."""
        return self.raw

    def write(self, text: str) -> int:
        returns = text.startswith("\r") and self._may_return
        self.raw.write(f"\r{clean_lines(text[1:])}" if returns else clean_lines(text))
        if "\n" in text:
            self._may_return = text.endswith("\n")
        elif text:
            self._may_return = returns
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def find_raw(stream: TextIO) -> TextIO:
    """Return the stream below a CleanStream."""
    return stream.raw if isinstance(stream, CleanStream) else stream


def clean_streams() -> None:
    """From now on, all that is printed is cleaned. Characters that the terminal's encoding lacks are escaped. What is
    printed to a closed stream (`2>&-`) is dropped: Python has None for it, which `print` takes for stdout."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, CleanStream(stream))
