"""Tables without lines, of any text."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from rljob_cli.tables import Column, build_table, make_console, print_lines_on, to_text

WIDE = [["数学", "b"], ["x", "等待" * 40]]


def lines_of(header, rows, **options):
    return to_text(build_table(header, rows), **options).splitlines()


def test_columns_align_by_the_displayed_width_of_their_cells():
    lines = lines_of(["A", "B"], WIDE)
    assert [line[: line.index(end)] for line, end in zip(lines, "Bb等", strict=True)] == [
        "A      ",
        "数学   ",
        "x      ",
    ]


@pytest.mark.parametrize("width", [30, 40])
def test_lines_are_cut_to_the_width_of_the_terminal(width):
    header, first, cut = lines_of(["A", "B"], WIDE, width=width)
    assert [cell_len(header), cell_len(first)] == [8, 8]
    assert cell_len(cut) in (width - 1, width), "a wide character may not fit in the last place"
    assert cut.startswith("x      ")
    assert cut.endswith("…")


def test_lines_of_a_pipe_are_not_cut_and_have_no_trailing_spaces():
    header, line = lines_of(["NAME", "WAITS FOR"], [["sums", "x" * 1000]])
    assert line == f"sums   {'x' * 1000}"
    assert header == "NAME   WAITS FOR"


def test_control_characters_of_a_program_are_removed():
    assert lines_of(["A"], [["one\r\ntwo\t\x1b[31mred"]]) == ["A", "one two [31mred"]


HEADER = [Column("NAME", is_text=True), Column("STEP"), Column("AGE", drop=1), Column("IDLE", drop=2), "WAITS FOR"]
ROW = ["a" * 30, "412/1000", "37m", "0.734", "c" * 50]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (200, f"{'a' * 30}   412/1000   37m   0.734   {'c' * 50}"),
        (80, f"{'a' * 30}   412/1000   37m   0.734   {'c' * 21}…"),
        (70, f"{'a' * 21}…   412/1000   37m   0.734   {'c' * 19}…"),
        (65, f"{'a' * 24}…   412/1000   37m   {'c' * 19}…"),
        (58, f"{'a' * 23}…   412/1000   {'c' * 19}…"),
        (40, "a" * 30),
        (29, f"{'a' * 28}…"),
    ],
)
def test_narrow_terminal_leaves_out_columns_and_cuts_no_number(width, line):
    header, row, *_ = lines_of(HEADER, [ROW], width=width)
    assert row == line
    assert all(cell_len(each) <= width for each in (header, row))
    names = [name for name in ("NAME", "STEP", "AGE", "IDLE", "WAITS FOR") if name in header]
    assert re.split(r"\s{3,}", header) == names, "headers do not run together"


def test_sentences_are_broken_between_words_and_paths_never():
    console = Console(file=io.StringIO(), width=20, force_terminal=True, color_system=None)
    print_lines_on(console)("a path of the tokenizer: /home/someone/models/small ends")
    lines = console.file.getvalue().splitlines()
    assert lines == ["a path of the", "tokenizer:", "/home/someone/models/small", "ends"]


def test_column_without_a_priority_is_named_when_it_is_left_out():
    assert len(lines_of(["SET", "ONE", "TWO"], [["a", "1" * 30, "2" * 30]], width=60)) == 2, "the last one is text"
    header, _, note = lines_of(["SET", Column("ONE"), Column("TWO")], [["a", "1" * 30, "2" * 30]], width=60)
    assert (header.split(), note) == (["SET", "ONE"], "for lack of width, without TWO")


@pytest.mark.parametrize(("columns", "width"), [("50", 50), (None, 100_000)])
def test_console_of_a_pipe_is_as_wide_as_columns_or_cuts_nothing(monkeypatch, capsys, columns, width):
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    console = make_console()
    assert console.width == width
    console.print("x" * 60)
    assert len(capsys.readouterr().out.splitlines()) == (2 if columns else 1)
