"""Bad inputs that only a call of the reward finds, from the command to its exit code. The others are unit tests."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rljob_cli.main import app
from tests.support.bad_inputs import BAD_INPUTS
from tests.support.waiting import DEADLINE_SECONDS

_FIRST, *_OTHERS = [bad for bad in BAD_INPUTS if bad.calls]


def assert_answered(bad, code, stdout, stderr):
    assert (code, stdout) == (2, "")
    assert bad.message in stderr
    assert [line.startswith("job.yaml:") for line in stderr.splitlines()].count(True) == 1
    assert "Traceback" not in stderr


def test_command_answers_a_reward_that_cannot_score_with_its_place(tmp_path):
    _FIRST.write(tmp_path)
    command = [sys.executable, "-m", "rljob_cli.main", *_FIRST.command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert_answered(_FIRST, done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("bad", _OTHERS, ids=lambda bad: bad.name)
def test_reward_that_cannot_score_is_answered_with_its_place(bad, tmp_path, monkeypatch):
    bad.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, bad.command)
    assert_answered(bad, done.exit_code, done.stdout, done.stderr)
