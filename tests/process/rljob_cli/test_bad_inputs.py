"""Bad inputs that only a call of the reward finds, from the command to its exit code. The others are unit tests."""

import subprocess
import sys

import pytest

from tests.support.bad_inputs import BAD_INPUTS

_DEADLINE_SECONDS = 60
_WITH_A_CALL = [bad for bad in BAD_INPUTS if bad.calls]


@pytest.mark.parametrize("bad", _WITH_A_CALL, ids=lambda bad: bad.name)
def test_reward_that_cannot_score_is_answered_with_its_place(bad, tmp_path):
    bad.write(tmp_path)
    command = [sys.executable, "-m", "rljob_cli.main", *bad.command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert bad.message in done.stderr
    assert done.stderr.count("job.yaml:") == 1
    assert "Traceback" not in done.stderr
