"""`make walks` traces the way from a prompt to its gradient, and that of a score request, in real runs."""

import json
import subprocess
import sys

from tests.paths import ROOT


def test_walks_pass_through_the_loop_and_through_the_server():
    command = [sys.executable, "-m", "dev.walks", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    *lines, counts = done.stdout.splitlines()
    passed = {tuple(line.split()[::2][:2]) for line in lines}
    assert ("prompt", "trainer_image/rljob_trainer/driver/loop.py:") in passed
    assert ("score", "reward_image/rljob_service/server/executor.py:") in passed
    assert all(walk["functions"] > walk["files"] > 10 for walk in json.loads(counts).values())
