"""Texts of a Pod's programs: printable and bounded, whatever was sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.wire.text import clean_line, clean_text

ESCAPES = st.sampled_from(
    ["\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\x1b", "\0", "\ud800", "\u202e", "\n", "\t", "é", "a"]
)


@pytest.mark.parametrize(
    ("sent", "clean"),
    [
        ("waits for 3 completions", "waits for 3 completions"),
        ("\x1b[1;31mred\x1b[0m and \x9b31mred", "red and red"),
        ("\x1b]0;title\x07after \x1b]8;;http://x\x1b\\link", "after link"),
        ("\x1b]0;no end", "0;no end"),
        ("a\0b\u202ec\ud800d", "a b c d"),
        ("two\r\n  lines\tand a tab", "two lines and a tab"),
        ("x" * 101, "x" * 99 + "…"),
    ],
)
def test_line_is_printable_and_bounded(sent, clean):
    assert clean_line(sent, 100) == clean


def test_text_keeps_its_lines():
    assert clean_text("ValueError: x\n  \x1b[31mhere\x1b[0m\r\n", 100) == "ValueError: x\n  here \n"


@given(st.lists(ESCAPES | st.text(max_size=5)).map("".join), st.integers(1, 20))
def test_cleaning_is_bounded_and_idempotent(sent, max_length):
    for clean, allowed in ((clean_line, ""), (clean_text, "\n")):
        once = clean(sent, max_length)
        assert len(once) <= max_length
        assert all(char.isprintable() or char in allowed for char in once)
        assert clean(once, max_length) == once, "an event is emitted when a stored message differs from the sent one"
        once.encode()
