"""What the output of a program means: its last line, however it arrives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.services import runner
from rljob_service.worker import environments
from rljob_service.worker.episodes import command
from rljob_service.worker.episodes.command import Command, _Output, read_last_line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"0.5", 0.5),
        (b" -1 \r", -1.0),
        (b"1e-3", 0.001),
        (b"inf", math.inf),
        (b'{"reward": 1, "info": {"n": 2}}', {"reward": 1, "info": {"n": 2}}),
        (b'{"state": {}}', {"state": {}}),
        (b'{"level": "info"}', None),
        (b'{"reward": 1', None),
        (b"[1]", None),
        (b"reward: 1", None),
        (b"1_000", None),
        (b"12 files", None),
        (b"", None),
    ],
)
def test_last_line_is_a_reward_or_a_reply_or_nothing(line: bytes, expected: Any) -> None:
    assert read_last_line(line) == expected


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"a\n0.5\n"], b"0.5"),
        ([b"a\n0.", b"5"], b"0.5"),
        ([b"1\n\n  \n"], b"1"),
        ([b"1\n", b"", b"2", b"\n", b"\n"], b"2"),
        ([b"1\n" + b"2" * (1 << 22), b"2"], b"..."),
        ([b"1\n" + b"x" * (1 << 22) + b"x", b"\n0.5"], b"0.5"),
    ],
)
def test_last_line_is_found_in_whatever_pieces_it_comes(
    chunks: list[bytes], expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_log", lambda data: None)
    output = _Output()
    for chunk in chunks:
        output.take(chunk)
    assert output.last_line == expected


def test_errors_of_a_program_are_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_log", lambda data: None)
    output = _Output()
    assert "without a word" in output.last_errors()
    for number in range(10_000):
        output.take_error(b"line %d\n" % number)
    assert output.last_errors().splitlines() == [":", *(f"line {number}" for number in range(9988, 10_000))]


def test_command_that_cannot_start_is_refused_before_any_episode(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"agent.runner.command: no-such-program was not found"):
        Command(["no-such-program"])
    with pytest.raises(UserError, match=r"agent.runner.workingDir: .*missing cannot be read"):
        Command(["python"], str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"agent.runner.command: \./agent.sh was not found"):
        Command(["./agent.sh"], str(tmp_path))
    script = tmp_path / "agent.sh"
    script.write_text("")
    script.chmod(0o755)
    assert Command(["./agent.sh", "x"], str(tmp_path)).command == [str(script), "x"]


def test_python_is_that_of_the_worker_where_path_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(Command(["python", "agent.py"]).command[0]).is_file()


def test_modules_of_the_image_are_those_that_the_api_names() -> None:
    assert (command.__name__, environments.__name__) == (runner.COMMAND_MODULE, runner.ENVIRONMENTS_MODULE)
