"""Tables of what a cluster says, which may be any text."""

from rich.cells import cell_len

from rljob_cli.cluster.formatting import format_table


def test_columns_are_as_wide_as_they_look_and_lines_fit_the_terminal():
    rows = [["数学", "b"], ["x", "等待" * 40]]
    lines = format_table(["A", "B"], rows)
    assert [line[: line.index(end)] for line, end in zip(lines, "Bb等", strict=True)] == [
        "A      ",
        "数学   ",
        "x      ",
    ]
    assert [cell_len(line) for line in format_table(["A", "B"], rows, width=20)][:2] == [8, 8]
    assert cell_len(format_table(["A", "B"], rows, width=20)[2]) in (19, 20)


def test_what_a_program_printed_neither_breaks_lines_nor_steers_the_terminal():
    assert format_table(["A"], [["one\r\ntwo\t\x1b[31mred"]]) == ["A", "one two [31mred"]
