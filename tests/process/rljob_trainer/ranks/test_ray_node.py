"""The check that a Ray node still has its raylet."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from rljob_trainer.ranks.ray_node import Raylet
from tests.support.waiting import DEADLINE_SECONDS

# A node: starts a process named raylet, prints its process id, reaps it, and keeps running.
NODE_PROGRAM = """
import ctypes, os, sys, time
child = os.fork()
if child == 0:
    ctypes.CDLL(None).prctl(15, b"raylet", 0, 0, 0)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
os.wait()
time.sleep(60)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


@pytest.fixture
def node():
    process = subprocess.Popen([sys.executable, "-c", NODE_PROGRAM], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_raylet_that_has_not_started_has_not_died():
    assert not Raylet(os.getpid()).has_died()


def test_killed_raylet_has_died_while_its_node_runs(node):
    raylet_process = int(node.stdout.readline())
    raylet = Raylet(node.pid)
    wait_until(lambda: not raylet.has_died() and raylet._seen)
    os.kill(raylet_process, 9)
    wait_until(raylet.has_died)
    assert node.poll() is None, "the node itself looks alive"
