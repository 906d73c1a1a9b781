"""The line of a download while a job is checked."""

import io
import logging

import pytest

from rljob_cli.check.downloads import show_downloads
from rljob_inputs.objects import copies
from rljob_inputs.objects.progress import Progress


class Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def download() -> None:
    """Log what a copy logs."""
    times = iter((0.0, 5.0, 11.0))
    progress = Progress("downloads s3://bucket/model", 200, copies.log.info, lambda: next(times))
    progress.add(50)
    progress.add(100)


def test_terminal_shows_the_share_and_keeps_nothing() -> None:
    terminal = Terminal(is_terminal=True)
    with show_downloads(is_wanted=True, stream=terminal):
        download()
        copies.log.info("\x1b[2Jx")
    first, second, third, erased, end = terminal.getvalue().split("\r")[1:]
    assert first == "downloads s3://bucket/model: 25 % of 200 B"
    assert second == "downloads s3://bucket/model: 75 % of 200 B"
    assert third.rstrip() == " [2Jx", "names of objects are others' texts"
    assert (erased.strip(), end) == ("", "")
    assert not logging.getLogger("rljob_inputs.objects").handlers


@pytest.mark.parametrize(("is_wanted", "is_terminal"), [(False, True), (True, False)])
def test_json_and_pipes_get_nothing(is_wanted: bool, is_terminal: bool) -> None:
    stream = Terminal(is_terminal=is_terminal)
    with show_downloads(is_wanted=is_wanted, stream=stream):
        download()
    assert stream.getvalue() == ""
