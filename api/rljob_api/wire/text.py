"""Texts, numbers and collections that a Pod's programs send, made safe to store and to print.

Invariant: no control character, terminal escape or half of a surrogate pair passes. What is too long is truncated,
since a part of a message is better than none; an impossible number is invalid.
"""

import re
from itertools import islice
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_ESCAPE = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # strings, such as titles and links
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences, such as colours
    r"|\x1b[ -~]?"
)
"""ECMA-48. Without it the printable rest of an escape would remain: [31m."""
_MAX_READ_PER_CHARACTER = 8
"""Characters that are read for each that may remain."""


def clean_line(text: str, max_length: int) -> str:
    """Return one printable line of at most `max_length` characters."""
    if len(text) <= max_length and text.isprintable():
        return text
    return _truncate(" ".join(_clean(text, max_length).split()), max_length)


def clean_text(text: str, max_length: int) -> str:
    """Return printable lines of at most `max_length` characters together."""
    if len(text) <= max_length and text.isprintable():
        return text
    return _truncate(_clean(text, max_length), max_length)


def _clean(text: str, max_length: int) -> str:
    text = _ESCAPE.sub("", text[: _MAX_READ_PER_CHARACTER * max_length])
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def _truncate(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _line(max_length: int) -> BeforeValidator:
    return BeforeValidator(lambda value: clean_line(value, max_length) if isinstance(value, str) else value)


def _text(max_length: int) -> BeforeValidator:
    return BeforeValidator(lambda value: clean_text(value, max_length) if isinstance(value, str) else value)


def first(max_length: int) -> BeforeValidator:
    """Annotate a list or a mapping: its first entries. A newer program may send more."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return dict(islice(value.items(), max_length))
        return value[:max_length] if isinstance(value, list) else value

    return BeforeValidator(cut)


Word = Annotated[str, _line(64), Field(max_length=64)]
"""A value of an enumeration, perhaps one that only a newer program knows."""
Name = Annotated[str, _line(253), Field(max_length=253)]
"""The name of a Kubernetes object, or of something within it."""
Line = Annotated[str, _line(1000), Field(max_length=1000)]
"""One line for a table or an event."""
MAX_MESSAGE_LENGTH = 2000
Paragraph = Annotated[str, _text(MAX_MESSAGE_LENGTH), Field(max_length=MAX_MESSAGE_LENGTH)]
"""Lines of a cause and its remedy."""
Count = Annotated[int, Field(ge=0, le=10**9)]
"""Sums over thousands of jobs fit into the API server's int64."""
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
