"""Logs as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import threading
from dataclasses import dataclass
from datetime import datetime

import pytest

from rljob_api.wire.contract import ENV_LOG_FORMAT, ExitCode
from rljob_api.wire.logs import build_formatter, configure_logging, print_last_line
from rljob_api.wire.termination import end_program


def log_lines(monkeypatch, **options) -> list[str]:
    stream = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as a program finds it
    configure_logging(stream=stream, **options)
    log = logging.getLogger("rljob_trainer.driver")
    log.warning("waits for %s\nsince %d s", "reward 数", 3)
    try:
        raise ValueError("no score")
    except ValueError:
        log.exception("a step failed")
    return stream.getvalue().splitlines()


def test_json_is_one_object_per_line_with_the_same_names(monkeypatch):
    waits, failed = map(json.loads, log_lines(monkeypatch, log_format="json"))
    assert datetime.fromisoformat(waits.pop("time")).utcoffset().total_seconds() == 0
    assert waits == {"level": "WARNING", "logger": "rljob_trainer.driver", "message": "waits for reward 数\nsince 3 s"}
    assert failed["exception"].endswith("ValueError: no score")


def test_field_that_a_library_adds_and_json_lacks_loses_no_line():
    @dataclass
    class Settings:
        lock: object

    fields = {"msg": "it failed", "settings": Settings(threading.Lock())}
    line = build_formatter("json").format(logging.makeLogRecord(fields))
    assert json.loads(line)["message"] == "it failed"


@pytest.mark.parametrize(("variable", "is_json"), [(None, False), ("text", False), ("json", True)])
def test_environment_decides(monkeypatch, variable, is_json):
    if variable is None:
        monkeypatch.delenv(ENV_LOG_FORMAT, raising=False)
    else:
        monkeypatch.setenv(ENV_LOG_FORMAT, variable)
    assert log_lines(monkeypatch)[0].startswith("{") == is_json
    line = build_formatter().format(logging.makeLogRecord({"msg": "x"}))
    assert line.startswith("{") == is_json


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_secret_reaches_a_log(monkeypatch, log_format, capsys, tmp_path):
    monkeypatch.setenv("RLJOB_TOKEN", "correct-horse")
    monkeypatch.setenv("RLJOB_TERMINATION_LOG", str(tmp_path / "end"))
    record = logging.makeLogRecord({"msg": "GET https://a:b@host/?x=1&key=k7 with %s", "args": ("correct-horse",)})
    line = build_formatter(log_format).format(record)
    assert "GET https://(hidden)@host/?x=1&key=(hidden) with (hidden)" in line
    end_program("https://a:b@host refused correct-horse", ExitCode.USER)
    expected = "error: https://(hidden)@host refused (hidden)"
    assert (tmp_path / "end").read_text() == expected
    assert expected in capsys.readouterr().err


def test_last_line_is_json_too_and_the_termination_message_stays_text(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(ENV_LOG_FORMAT, "json")
    monkeypatch.setenv("RLJOB_TERMINATION_LOG", str(tmp_path / "end"))
    end_program("no GPU", ExitCode.USER)
    found = json.loads(capsys.readouterr().err)
    assert (found["level"], found["message"]) == ("ERROR", "error: no GPU")
    assert (tmp_path / "end").read_text() == "error: no GPU"
    print_last_line("error: x", "text")
    assert capsys.readouterr().err == "error: x\n"
