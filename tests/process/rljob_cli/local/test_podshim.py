"""What counts as a descendant. test_kubelet tests the whole shim with real containers."""

import os
import signal
import subprocess
import sys
import time

from rljob_cli.local.node.podshim import descendants, scan_processes
from tests.support.waiting import DEADLINE_SECONDS

# The first thread ends with the exit system call (60 on x86-64, 93 on arm64); another thread and a child live on.
HEADLESS = """
import ctypes, os, platform, threading, time
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(child, flush=True)
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""


def test_descendants_include_children_of_a_process_whose_first_thread_has_ended():
    process = subprocess.Popen([sys.executable, "-c", HEADLESS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while process.pid not in scan_processes()[1]:
            assert time.monotonic() < deadline, "the first thread did not end"
            time.sleep(0.01)
        assert child in descendants([os.getpid()]), "it would outlive its container"
        assert process.pid not in descendants([os.getpid()])
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
