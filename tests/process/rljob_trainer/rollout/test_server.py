"""Signals to the rollout's program while it loads."""

from __future__ import annotations

import subprocess
import sys

from rljob_api.wire.contract import ExitCode

PROGRAM = """
import os, signal, sys
from rljob_trainer.rollout import server
def load_job_file(_):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was lost")
os.environ['RLJOB_JOB_FILE'] = ''
server.load_job_file = load_job_file
sys.exit(server.main())
"""


def test_sigterm_while_loading_ends_the_program() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == ExitCode.SUCCEEDED, ended.stderr
    assert "stopped by a signal" in ended.stderr
