"""Tables without lines, of any text."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from rljob_cli.tables import build_table, make_console, to_text

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


@pytest.mark.parametrize("width", [20, 40])
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


def test_only_the_last_column_is_cut_and_uses_the_remaining_width():
    lines = lines_of(["A", "B", "C"], [["a" * 10, "b" * 10, "c" * 10]], width=30)
    assert lines[1] == f"{'a' * 10}   {'b' * 10}   ccc…"


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
