"""Tables without lines, as kubectl prints them, drawn by rich.

Invariant: on a terminal no line is wider than the terminal, and only the last column is cut. In a pipe nothing is cut.
"""

import io
import os
import re
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
"""Line breaks, tabs and escape sequences, which a program's last output may contain."""
_PIPE_WIDTH = 100_000


def build_table(
    header: Sequence[str], rows: Sequence[Sequence[str | Text]], *, gap: int = 3, header_style: str = ""
) -> Table:
    """Columns as wide as their widest cell; the last one is shortened to what is left of the terminal."""
    table = Table(box=None, padding=0, pad_edge=False, header_style=header_style)
    *others, last = header
    for name in others:
        table.add_column(_cell(name, gap), no_wrap=True)
    table.add_column(_cell(last))
    for row in rows:
        table.add_row(*(_cell(value, gap) for value in row[:-1]), _cell(row[-1]))
    return table


def _cell(value: str | Text, gap: int = 0) -> Text:
    # The gap is part of the cell, because rich counts the padding of the last column, which it does not draw.
    cell = Text(_CONTROLS.sub(" ", value)) if isinstance(value, str) else value
    cell.pad_right(gap)
    cell.no_wrap, cell.overflow = True, "ellipsis"
    return cell


def to_text(renderable: RenderableType, width: int = _PIPE_WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(renderable, soft_wrap=isinstance(renderable, str), markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def make_console() -> Console:
    """Return a console for stdout. It is as wide as the terminal or $COLUMNS; in a pipe it cuts and folds nothing."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def show(renderable: RenderableType) -> None:
    """Print for the terminal, or as plain text in full to a pipe."""
    console = make_console()
    if console.is_terminal:
        console.print(renderable)
    else:
        print(to_text(renderable), flush=True)
