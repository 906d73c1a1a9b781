"""What a container's last message is taken to say."""

import pytest

from rljob_operator.world import what_it_said


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (None, ""),
        ("data.train: no column 'q'\nit has: prompt, answer\n", "data.train: no column 'q'\nit has: prompt, answer"),
        ("INFO a\n" * 9 + "error: wrong\nremedy\n", "wrong\nremedy"),
        ("INFO a\n" * 9 + "gone\n", "gone"),
        ('Traceback (most recent call last):\n  File "x"\nValueError: no\n', "ValueError: no"),
    ],
)
def test_the_words_that_help_are_found_in_a_message_a_log_or_a_traceback(message, said):
    assert what_it_said(message) == said
