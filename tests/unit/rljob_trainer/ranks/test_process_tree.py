"""A Ray node that has lost its raylet is seen, and one that has not started it yet is left alone."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from rljob_trainer.ranks.process_tree import Raylet, descendants

DEADLINE_SECONDS = 20
# A node: it starts a process that calls itself raylet, tells its pid, and stays.
NODE = """
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
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@pytest.fixture
def node():
    process = subprocess.Popen([sys.executable, "-c", NODE], stdout=subprocess.PIPE, text=True)
    yield process
    for pid in descendants(process.pid):
        os.kill(pid, 9)
    process.kill()
    process.wait()


def test_a_node_without_a_raylet_yet_has_not_lost_it():
    assert not Raylet(os.getpid()).has_died()


def test_a_node_whose_raylet_was_killed_has_lost_it(node):
    child = int(node.stdout.readline())
    raylet = Raylet(node.pid)
    wait_until(lambda: not raylet.has_died() and raylet._seen)
    os.kill(child, 9)
    wait_until(raylet.has_died)
    assert node.poll() is None, "the node itself looks alive"
