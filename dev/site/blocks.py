"""Blank lines between blocks of Markdown. GitHub needs none before a heading, list, table or block of code; the
generator's parser takes a heading after a table as its next row, and a list after a sentence as text."""

from __future__ import annotations

import re
from collections.abc import Iterator

_STARTS = {"heading": r"#{1,6} ", "list": r"([-*]|\d+\.) ", "table": r"\|", "comment": r"<!--"}


def separate_blocks(text: str) -> str:
    """Return the text with a blank line wherever one kind of block follows another."""
    before, lines = "blank", []
    for kind, line in _read_kinds(text):
        if before == "list" and kind == "text" and line[0] == " ":
            kind = "list"  # the item goes on
        if _are_divided(before, kind):
            lines.append("")
        lines.append(line)
        before = kind
    return "\n".join(lines) + "\n"


def name_headers(text: str) -> str:
    """Return the text with a name in each empty header of a table, which screen readers read and nobody sees."""
    lines, before = [], ""
    for kind, line in _read_kinds(text):
        if kind == "table" and before != "table":
            cells = line.strip().removeprefix("|").removesuffix("|").split("|")
            if not all(cell.strip() for cell in cells):
                named = [
                    cell if cell.strip() else f' <span class="only-read">column {i}</span> '
                    for i, cell in enumerate(cells, 1)
                ]
                line = f"|{'|'.join(named)}|"
        lines.append(line)
        before = kind
    return "\n".join(lines) + "\n"


def _read_kinds(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line with its kind. The lines of a block of code are `code`, with its last one as `fence`."""
    fence = ""
    for line in text.splitlines():
        start = re.match(r"\s*(```|~~~)", line)
        if fence:
            ends = line.strip() == fence
            yield ("fence" if ends else "inside"), line
            fence = "" if ends else fence
        elif start:
            fence = start[1]
            yield "code", line
        else:
            yield _name_kind(line), line


def _name_kind(line: str) -> str:
    if not line.strip():
        return "blank"
    return next((kind for kind, start in _STARTS.items() if re.match(start, line)), "text")


def _are_divided(before: str, kind: str) -> bool:
    """Whether a blank line belongs between two lines. What follows an item of a list, without one, belongs to it."""
    if "blank" in (before, kind) or kind in ("inside", "fence"):
        return False
    if before == "list" or (before == "text" and kind == "text"):
        return kind in ("heading", "table", "comment")
    return before != kind or kind == "heading"
