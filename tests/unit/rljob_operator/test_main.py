"""The exit codes of the operator's program."""

import gc

import pytest

from rljob_api.errors import TransientError
from rljob_operator import __main__ as program


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Leave the garbage collector and the log of the tests as they are."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(program, "configure_logging", lambda *_: None)


async def _end(settings):
    return None


async def _fail(settings):
    raise TransientError("no answer")


def test_operator_that_was_stopped_succeeds(monkeypatch):
    monkeypatch.setattr(program, "_run", _end)
    assert program.main([]) == 0


def test_operator_that_failed_may_start_again(monkeypatch, capsys):
    monkeypatch.setattr(program, "_run", _fail)
    assert program.main([]) == 75
    assert "error: no answer" in "".join(capsys.readouterr())
