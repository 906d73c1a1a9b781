"""Tables without lines, as kubectl prints them, drawn by rich.

Invariant: on a terminal no line is wider than the terminal. Whole columns are left out where not all fit, and only text
is cut, with an ellipsis, so a number is never a part of itself. In a pipe everything is shown in full.
"""

import io
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rljob_cli.terminal import clean, clean_lines, find_raw

_PIPE_WIDTH = 100_000
_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


@dataclass(frozen=True)
class Column:
    """A column of a table. The first one is always shown."""

    name: str
    drop: int = 0
    """The column with the highest value is left out first; of equal ones, the one further right. If it has no value, a
    line below the table says that it is left out."""
    is_text: bool = False
    """Whether its cells may be cut."""
    least: int = 20
    """Columns are left out before a text is cut to less than this width."""


@dataclass(frozen=True)
class FittedTable:
    """A table whose columns are chosen when the width is known."""

    columns: list[Column]
    rows: list[list[Text]]
    gap: int
    header_style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [[Text(column.name), *(row[i] for row in self.rows)] for i, column in enumerate(self.columns)]
        widths = fit_columns(
            self.columns, [max(c.cell_len for c in each) for each in cells], self.gap, options.max_width
        )
        *others, last = widths
        table = Table(box=None, padding=0, pad_edge=False, header_style=self.header_style)
        # The gap is part of the width, because rich counts the padding of the last column, which it does not draw.
        for i in others:
            table.add_column(cells[i][0], width=widths[i] + self.gap, no_wrap=True)
        table.add_column(cells[last][0], width=widths[last], no_wrap=True)
        for row in zip(*([_cut(cell, widths[i]) for cell in cells[i][1:]] for i in widths), strict=True):
            table.add_row(*row)
        yield table
        if hidden := [c.name for i, c in enumerate(self.columns) if i not in widths and c.drop <= 0]:
            yield Text(f"for lack of width, without {', '.join(hidden)}", style="dim")


def _cut(cell: Text, width: int) -> Text:
    shown = cell.copy()
    shown.truncate(width, overflow="ellipsis")
    return shown


def fit_columns(columns: Sequence[Column], widths: Sequence[int], gap: int, available: int) -> dict[int, int]:
    """Return the index of each column to show, from left to right, with its width. `widths`: of the widest cells."""
    least = [min(w, max(c.least, len(c.name))) if c.is_text else w for c, w in zip(columns, widths, strict=True)]
    shown = list(range(len(columns)))
    while len(shown) > 1 and sum(least[i] for i in shown) + gap * (len(shown) - 1) > available:
        shown.remove(max(shown[1:], key=lambda i: (columns[i].drop, i)))
    left = available - sum(least[i] for i in shown) - gap * (len(shown) - 1)
    fitted = {}
    for i in shown:
        more = min(left, widths[i] - least[i])  # negative if not even the first column fits
        fitted[i], left = max(1, least[i] + more), left - more
    return fitted


def build_table(
    header: Sequence[str | Column], rows: Sequence[Sequence[str | Text]], *, gap: int = 3, header_style: str = ""
) -> FittedTable:
    """Columns as wide as their widest cell. A name stands for a column of numbers; the last name, for one of text that
    is left out last."""
    *others, last = header
    columns = [c if isinstance(c, Column) else Column(c) for c in others]
    columns.append(last if isinstance(last, Column) else Column(last, drop=-1, is_text=True))
    return FittedTable(
        columns,
        [[Text(clean(value)) if isinstance(value, str) else value for value in row] for row in rows],
        gap,
        header_style,
    )


class CleanConsole(Console):
    """A console that draws texts without control characters, and takes no text as markup."""

    def __init__(self, file: TextIO, **options: Any) -> None:
        super().__init__(file=find_raw(file), markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Those with `control` are rich's own, such as movements of the cursor.
            yield segment if segment.control else Segment(clean_lines(segment.text), segment.style)


def to_text(renderable: RenderableType, width: int = _PIPE_WIDTH) -> str:
    console = CleanConsole(io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(renderable, soft_wrap=isinstance(renderable, str), highlight=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def make_console() -> Console:
    """Return a console for stdout. It is as wide as the terminal or $COLUMNS; in a pipe it cuts and folds nothing."""
    console = CleanConsole(sys.stdout)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def choose_console(output: str) -> Console:
    """Return the console for what people read: that of stderr, if stdout has JSON."""
    return make_error_console() if output == "json" else make_console()


def print_lines_on(console: Console) -> Callable[[str], None]:
    """Return what prints sentences. They are broken between words alone, so that a path can be copied."""

    def say(text: str) -> None:
        width = console.width if console.is_terminal else _PIPE_WIDTH
        lines = (textwrap.fill(line, width, **_WHOLE_WORDS) for line in text.splitlines())
        console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)

    return say


def make_error_console() -> Console:
    """Return a console for stderr."""
    return CleanConsole(sys.stderr)


def choose_width(default: int) -> int:
    """Return the columns of the terminal, or $COLUMNS; in a pipe `default`."""
    width = make_console().width
    return default if width == _PIPE_WIDTH else width


def show(renderable: RenderableType) -> None:
    """Print for the terminal, or as plain text in full to a pipe."""
    console = make_console()
    if console.is_terminal:
        console.print(renderable, highlight=False)
    else:
        print(to_text(renderable), flush=True)
