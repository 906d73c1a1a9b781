"""What the model sees of a program: bounded, with its end."""

from __future__ import annotations

import pytest

from rljob_service.worker.code.code_output import Output, describe_exit


def describe(*pieces: bytes, end: str = "", max_characters: int = 100) -> str:
    output = Output(max_characters)
    for piece in pieces:
        output.take(piece)
    return output.describe(end)


@pytest.mark.parametrize(
    ("pieces", "end", "text"),
    [
        ((b"4\n",), "", "4"),
        ((b"a", b"b\n\nc\n"), "", "ab\n\nc"),
        ((), "", "[no output]"),
        ((b" \n",), "", "[no output]"),
        ((b"a\n",), "exit code 3", "a\n[exit code 3]"),
        ((), "timed out after 2 s", "[timed out after 2 s]"),
        ((b"\xff", "ä".encode()[:1], "ä".encode()[1:]), "", "\N{REPLACEMENT CHARACTER}ä"),
    ],
)
def test_the_model_sees_the_output_and_how_the_program_ended(pieces: tuple[bytes, ...], end: str, text: str) -> None:
    assert describe(*pieces, end=end) == text


def test_of_a_long_output_the_beginning_and_the_end_are_shown() -> None:
    text = describe(b"first" + b"." * 500, b"last", end="exit code 1", max_characters=60)
    assert (len(text), text.count("\n[...]\n")) == (60, 1)
    assert text.startswith("first.")
    assert text.endswith(".last\n[exit code 1]")


def test_a_flood_is_counted_and_a_bounded_part_of_it_is_kept() -> None:
    output = Output(10)
    for _ in range(1000):
        output.take("ä".encode() * 500)
    output.take(b"b")
    assert output.num_bytes == 1_000_001
    assert len(output._head) + len(output._tail) == 80
    assert output.describe() == "ä\n[...]\näb"


@pytest.mark.parametrize("max_characters", [1, 5, 17])
def test_no_text_is_longer_than_the_limit(max_characters: int) -> None:
    assert len(describe(b"x" * 100, end="exit code 127", max_characters=max_characters)) == max_characters


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, ""),
        (3, "exit code 3"),
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL, perhaps for its memory"),
        (-63, "killed by signal 63"),
    ],
)
def test_the_end_of_a_program_is_described(code: int, text: str) -> None:
    assert describe_exit(code) == text
