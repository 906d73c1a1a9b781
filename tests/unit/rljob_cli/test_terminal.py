"""Control characters of others' texts reach no terminal."""

import io
import re

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rljob_cli.tables import CleanConsole
from rljob_cli.terminal import CleanStream, clean, clean_colours, clean_lines, find_raw
from tests.paths import ROOT

TITLE, CLIPBOARD, CLEAR, CSI = "\x1b]0;owned\x07", "\x1b]52;c;aGk=\x1b\\", "\x1b[2J", "\x9b2J"
HOSTILE = f"{TITLE}{CLIPBOARD}{CLEAR}{CSI}\x08\x0b\x7f\0[link=https://evil.example]x[/link]"
CONTROLS = {chr(code) for code in (*range(32), *range(127, 160))}


def test_lines_and_tabs_stay_and_a_carriage_return_hides_nothing():
    assert clean_lines("a\tb\r\nc") == "a\tb\nc"
    assert clean_lines("hidden\rshown") == "hidden shown"
    assert not set(clean_lines(HOSTILE)) & CONTROLS
    assert clean("a\nb\x1b[2J") == "a b [2J"
    assert clean_lines("ä 漢 \u200d🙂") == "ä 漢 \u200d🙂"


def test_a_colour_of_a_log_ends_with_its_line():
    assert clean_colours("\x1b[31mred \x1b[2Jx\r") == "\x1b[31mred  [2Jx \x1b[0m"
    assert clean_colours("plain") == "plain"


def test_stream_cleans_and_keeps_the_rest_of_the_stream():
    raw = io.StringIO()
    stream = CleanStream(raw)
    print(HOSTILE, file=stream)
    stream.writelines([HOSTILE])
    assert set(raw.getvalue()) & CONTROLS == {"\n"}
    assert find_raw(stream) is raw
    assert not stream.isatty()


def test_progress_bar_redraws_its_line_but_nothing_hides_other_text():
    raw = io.StringIO()
    stream = CleanStream(raw)
    for text in ("\r 0 %", "\r50 %", "\r", "\n"):
        stream.write(text)
    assert raw.getvalue() == "\r 0 %\r50 %\r\n"
    raw.truncate(raw.seek(0))
    print("answer:", "\rfake", file=stream)
    print("\rbar", "\rover\rit", end="", file=stream)
    assert raw.getvalue() == "answer:  fake\n\rbar  over it"


@pytest.mark.parametrize("wrap", [lambda text: text, Text, lambda text: _table(text)], ids=["str", "Text", "table"])
def test_console_draws_styles_but_no_control_characters_of_a_text(wrap):
    raw = io.StringIO()
    console = CleanConsole(CleanStream(raw), force_terminal=True, color_system="standard", width=200)
    console.print(wrap(HOSTILE), style="red")
    written = raw.getvalue()
    assert "\x1b[31m" in written, "rich's own colours"
    for sequence in (TITLE, CLIPBOARD, CLEAR, CSI, "\x1b]8;"):
        assert sequence not in written
    assert not set(written) & (CONTROLS - {"\x1b", "\n"})


def _table(text):
    table = Table()
    table.add_column(text)
    table.add_row(text, Text(text))
    return table


def test_live_view_moves_the_cursor_but_draws_no_control_characters_of_a_text():
    raw = io.StringIO()
    with Live(Text(HOSTILE), console=CleanConsole(raw, force_terminal=True), auto_refresh=False) as live:
        live.update(Text(HOSTILE), refresh=True)
    assert "\x1b[?25l" in raw.getvalue(), "the cursor is hidden"
    assert not {each for each in (TITLE, CLIPBOARD, CLEAR, CSI) if each in raw.getvalue()}


def test_no_module_makes_a_console_that_does_not_clean():
    for path in (ROOT / "cli/rljob_cli").rglob("*.py"):
        made = re.findall(r"(?<!class Clean)\bConsole\(.*\)(?!:)", path.read_text())
        assert not made, f"{path}: use make_console of rljob_cli.tables"
